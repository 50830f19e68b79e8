"""The parts of benchmarks/soak.py: the choice of faults, the faults, their healing, and the final check of what is left."""
