"""The main job on real input, through Dagster, with faults."""
