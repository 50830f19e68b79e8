"""What is stored: the catalog, DLAC's tables, snapshots and row groups, the consumption ledger and its fence."""
