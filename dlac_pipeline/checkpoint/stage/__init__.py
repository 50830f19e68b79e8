"""Copies of a state, written once to durable files."""
