"""States in the memory of several nodes: each node serves its states, copies them to a buddy, and fetches missing ones."""
