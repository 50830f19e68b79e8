"""Jobs, sensors and schedules of this project, its definitions, and the demo."""
