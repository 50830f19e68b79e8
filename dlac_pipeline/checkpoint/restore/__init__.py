"""Checkpoints as local folders again: verified copies, conversion, foreign formats, export, and the resume points of attempts."""
