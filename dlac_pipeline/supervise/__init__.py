"""Recovery: from the ledger to a verified resume point, and the supervisor of a node's ranks."""
