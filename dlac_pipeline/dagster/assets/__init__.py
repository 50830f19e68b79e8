"""Assets of a training run, `plans/<run>` and `models/<run>`, and the checks of the model."""
