"""What benchmarks/control_plane.py measures: a fleet of real supervisors with stub ranks on one node."""
