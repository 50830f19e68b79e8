"""A foreign training loop beside DLAC's reader: the files of `Shadow` in, where the two differ out."""
