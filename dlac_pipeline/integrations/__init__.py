"""Adapters for the loops of other trainers: which hook ends a step, what saves, and what loads."""
