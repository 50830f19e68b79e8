"""Jobs, sensors and schedules of this project, and its definitions."""
