"""Stragglers: reports of slow ranks."""
