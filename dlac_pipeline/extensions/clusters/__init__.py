"""Launchers of clusters: Slurm and Kubernetes."""
