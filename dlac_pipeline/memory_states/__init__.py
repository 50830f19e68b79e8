"""States in memory: ranks save them, a claim chooses one, and nodes fetch the parts that they lack."""
