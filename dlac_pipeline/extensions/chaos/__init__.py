"""Fault injection: a run of a job that is struck by faults, healed by real recoveries, and audited."""
