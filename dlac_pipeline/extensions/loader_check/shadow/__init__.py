"""A foreign training loop beside DLAC's reader: the files of `dlac.Shadow` in, where the two differ out."""
