"""The experiments of `benchmarks.paper`, and its page."""
