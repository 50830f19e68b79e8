"""Programs that measure. Each prints one JSON object as its last line (see figures.py)."""
