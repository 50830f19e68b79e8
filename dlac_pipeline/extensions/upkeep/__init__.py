"""Upkeep of tables, apart from runs."""
