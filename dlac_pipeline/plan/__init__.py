"""Plan: snapshot -> work units -> slices of key groups. The order is a pure function of the leg."""
