"""Legs of a run: the record that determines the order, the leg a spec requests, and the next one."""
