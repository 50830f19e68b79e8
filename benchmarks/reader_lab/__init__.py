"""Tables of many shapes, and the loaders that read them beside DLAC's reader: `python -m benchmarks.shapes`."""
