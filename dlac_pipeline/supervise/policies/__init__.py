"""Policies after a failed attempt: restart, and rows to leave out."""
