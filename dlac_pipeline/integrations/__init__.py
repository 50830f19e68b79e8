"""Connections to other systems."""
