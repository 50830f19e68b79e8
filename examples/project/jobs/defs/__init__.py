"""Definitions as components."""
