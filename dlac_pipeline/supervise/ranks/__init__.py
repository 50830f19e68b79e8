"""Ranks of an attempt as their supervisor sees them: start, processes, events, and logs."""
