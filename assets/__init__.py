"""Dagster's nouns: corpus, tokens, pinned snapshot, work plan, model checkpoint, and the checks on them."""
