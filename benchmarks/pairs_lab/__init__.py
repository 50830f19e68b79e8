"""Parts of benchmarks/pairs.py."""
