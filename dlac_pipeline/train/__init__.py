"""A training run inside a rank: startup, batches, checkpoints, heartbeat, and preemption."""
