"""Jobs, sensors and schedules of this project."""
