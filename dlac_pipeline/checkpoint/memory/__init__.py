"""States in shared memory, from which a relaunch on the same node resumes without the store."""
