"""Row filters: SQL conditions on the columns of a table, with one meaning wherever they are decided.

`grammar` reads the text and binds it to a schema, `literals` fits literals to the type of their column, `conditions` decides, and
`facts` holds what partitions, column metrics and Parquet statistics prove. The meaning is that of SQL:

- Logic has three values. A row is selected if the condition is true for it, not if it is unknown.
- NULL makes every comparison unknown. NULL is neither NaN nor not NaN.
- NaN equals nothing: `=` and `in` are false, `!=` and `not in` are true. NaN has no order: `<`, `<=`, `>`, `>=` and `between`
  are unknown, so that `not (x < 1)` selects it no more than `x >= 1` does.
- -0.0 and 0.0 are equal.
- A literal is compared by its exact value, whatever the column's type: `n <= 1.5` is `n <= 1` for integers, `n = 1.5` is false.
  Only for float and double columns a literal is first rounded to the nearest value of the column's type.
"""
