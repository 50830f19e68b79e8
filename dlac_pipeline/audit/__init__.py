"""DuckDB over the lakehouse; the SQL lives in .sql files."""
