"""Reader State Tracker: what each optimizer step consumed."""
