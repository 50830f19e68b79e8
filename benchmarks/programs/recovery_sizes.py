"""Sizes that benchmarks/recovery.py shares with its ranks."""

WIDTH = 64
"""Numbers in a row."""
BATCH = 64
"""Rows in a global batch."""
EVERY_STEPS = 5
"""Steps between checkpoints."""
