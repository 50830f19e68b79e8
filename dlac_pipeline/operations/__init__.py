"""Commands of an operator: rewind, fork, adopt, rehearse, status, and pending work."""
