"""Policies after a failed attempt: restart, poison rows, stragglers."""
