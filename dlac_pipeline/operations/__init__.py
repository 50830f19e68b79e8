"""Commands of an operator: rewind, fork, adopt, status, and pending work."""
