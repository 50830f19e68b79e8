"""Recovery Coordinator: ledger -> verified resume point; the supervisor beside the ranks."""
