"""Poison rows: rows that kill ranks, and damaged row groups, are found and left out."""
