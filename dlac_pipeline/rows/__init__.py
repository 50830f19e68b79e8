"""What the values of a row become: columns as arrays, a user's transform, tokens; a leg binds them by their digests."""
