"""Rebuild of a ledger and of DLAC's other tables after a loss: from the journal, metadata files, and data files."""
