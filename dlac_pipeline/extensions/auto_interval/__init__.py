"""The interval between checkpoints that costs the least."""
