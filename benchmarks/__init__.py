"""Programs that measure; each prints one JSON object as its last line (see figures.py)."""
