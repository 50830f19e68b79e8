"""The ledger of consumption: its tables, their rows, and what may be committed to them."""
