"""The commit of a checkpoint: votes, ledger rows, local copies, retention."""
