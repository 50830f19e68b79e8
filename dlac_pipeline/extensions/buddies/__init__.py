"""States in memory on several nodes: copies on buddies, and fetches before a recovery."""
