"""Iceberg tables: open catalogs, safe commits, snapshots, pins, data files with their deletes, columns, and row groups."""
