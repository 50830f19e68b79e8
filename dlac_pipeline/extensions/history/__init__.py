"""The history of a table: the rows that came and went between two snapshots, and the places to read them."""
