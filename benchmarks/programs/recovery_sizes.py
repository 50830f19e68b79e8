"""Sizes that benchmarks/recovery.py and the ranks that it starts have in common."""

WIDTH = 64
"""Numbers in a row."""
BATCH = 64
"""Rows in a global batch."""
EVERY_STEPS = 5
"""Steps between checkpoints."""
