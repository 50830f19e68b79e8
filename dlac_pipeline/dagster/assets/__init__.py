"""Assets of a training run: pinned snapshot, work plan, model checkpoint, and the checks on the model."""
