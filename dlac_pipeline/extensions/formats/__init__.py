"""Tables of other formats, which an Iceberg table in the lakehouse's own catalog mirrors."""
