"""Values of a row: columns as arrays, a user's transform, tokens. A leg binds them by their digests."""
