"""What starts it: Dagster jobs, sensors and definitions; the demo."""
