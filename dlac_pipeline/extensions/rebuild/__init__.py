"""Data of lost tables in other places: manifests of the store, metadata files, and data files."""
