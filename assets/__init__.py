"""Assets of the demo's input: corpus and tokens."""
