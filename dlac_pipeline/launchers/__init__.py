"""Launchers: their protocol, and training on this node and nodes that join it."""
