"""Parts of benchmarks/control_plane.py: real supervisors of many nodes with stub ranks, on one node."""
