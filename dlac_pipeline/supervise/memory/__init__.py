"""States in the memory of several nodes: each node serves its own, copies them to a buddy, and fetches what it lacks."""
