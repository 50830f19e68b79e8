"""Sequences of tokens: documents are tokenized, and packed end to end."""
