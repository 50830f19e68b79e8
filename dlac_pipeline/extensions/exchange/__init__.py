"""Exchange of states: forks and adopted checkpoints begin runs, and weights are exported."""
