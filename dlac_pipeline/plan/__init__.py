"""Snapshot -> work units -> slices of key groups; the order as a pure function of the leg."""
