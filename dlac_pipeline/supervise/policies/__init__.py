"""Policies after a failed attempt: restart, hangs, poison rows, corrupt row groups, stragglers."""
