"""Kept checkpoints of a run: their list, their tags, and the verification of their files."""
