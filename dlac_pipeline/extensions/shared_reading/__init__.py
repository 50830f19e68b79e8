"""Sharing of decoded batches: one rank of a node decodes a share, and the others map its memory. `read.shares = "node"`."""
