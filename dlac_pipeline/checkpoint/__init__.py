"""Checkpoints: the manager of a rank, staging, commit, restore, and engine adapters."""
