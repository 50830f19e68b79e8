"""The job spec and its sections, and the request that a launcher receives."""
