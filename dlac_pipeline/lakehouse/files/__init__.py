"""Data files of tables, in Parquet or in a format that enters through the door `dlac.files`."""
