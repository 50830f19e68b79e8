"""Launchers of clusters, Slurm and Kubernetes, and the processes of launches that an orchestrator started."""
