"""The parts of benchmarks/soak.py: what strikes when, how it is done, when it is healed, and what is left in the end."""
