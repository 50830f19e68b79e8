"""Streams: runs that wait for appended rows in place, with the same processes."""
