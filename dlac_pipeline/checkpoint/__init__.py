"""Checkpoint Manager: stage, digest, vote, commit; engine adapters."""
