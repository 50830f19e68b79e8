"""Signs of life: the record that a rank writes, and launches of other nodes."""
