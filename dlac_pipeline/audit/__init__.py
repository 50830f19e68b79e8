"""DuckDB over the lakehouse. The SQL is in .sql files."""
