"""Nouns of this project: corpus, tokens, and the assets of a training run."""
