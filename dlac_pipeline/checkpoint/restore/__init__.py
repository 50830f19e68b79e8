"""Checkpoints as local folders again: verified copies, conversion, foreign formats, export."""
