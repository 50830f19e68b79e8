"""Parts of `python -m benchmarks.per_step`: what a replica group records, how it dies, and the launches of both sides."""
