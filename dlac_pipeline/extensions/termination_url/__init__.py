"""Announcements of clouds that a node is terminated."""
