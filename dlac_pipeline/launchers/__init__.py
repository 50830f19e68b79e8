"""Launchers: training on this node and those that join it, or as a job of a cluster's scheduler."""
