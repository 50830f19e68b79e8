"""Documents that a model was trained on: forgetting them, certificates of it, and passports of exported weights."""
