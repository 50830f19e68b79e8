"""Branches of a run: rewinds, and the retirement of checkpoints that they abandon."""
