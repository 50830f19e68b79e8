"""Steps that a run has trained: by the ledger their legs and ranks, by the order their rows, by the data files the values."""
