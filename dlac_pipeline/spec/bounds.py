"""Bounds of the numbers that settings and options may have. A help shows them, so this module imports nothing."""

LONGEST_WAIT_S = 1_209_600
"""Two weeks: the longest time that a setting lets something wait. Timers of sockets end at 24 days."""
LONGEST_S = 315_360_000
"""Ten years: the longest time that is only compared."""
MOST_STEPS = 10**12
MOST_NODES = 65_536
LOST_AFTER_S = 120.0
"""Seconds of silence after which a launch on another node counts as lost."""
