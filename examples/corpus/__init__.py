"""Real input for a training run: Python sources as a corpus table, and the corpus as a table of token sequences."""
