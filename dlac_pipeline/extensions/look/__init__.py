"""What people look at: the state of runs, their incidents and logs, and pictures of them."""
