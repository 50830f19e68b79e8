"""Row filters: SQL conditions on the columns of a table, with one meaning wherever they are decided (docs/reading.md).

`grammar` reads the text and binds it to a schema, `literals` fits literals to the type of their column, `conditions` decides, and
`facts` holds what partitions, column metrics and Parquet statistics prove.
"""
