"""Connections to other systems: the loops of other trainers, and listeners of a run's events."""
