"""Tables over Parquet files in their place."""
