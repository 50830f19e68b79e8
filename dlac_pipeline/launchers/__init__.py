"""Where a run trains: on this machine and those that meet it, or as a job of a cluster's scheduler."""
