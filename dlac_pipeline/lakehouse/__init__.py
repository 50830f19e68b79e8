"""Storage: the catalog, DLAC's tables, snapshots and row groups, the ledger of consumption and its fence."""
