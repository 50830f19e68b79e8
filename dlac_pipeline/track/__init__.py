"""Reader State Tracker: the rows that each optimizer step consumed."""
