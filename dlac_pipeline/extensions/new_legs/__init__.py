"""Legs that change what a run reads: appended and gone rows, exclusions, passes, unreadable row groups."""
