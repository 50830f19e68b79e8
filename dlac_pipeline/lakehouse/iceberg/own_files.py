"""DLAC's own tables as SQL over their Parquet files. Of a large table DuckDB reads what a query needs, PyArrow whole columns.

DuckDB reads files in a local warehouse. It has no credentials for others, whose rows come through PyIceberg.
"""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, GreaterThan, In, LessThanOrEqual
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import DataScan, FileScanTask, Table

from dlac_pipeline.lakehouse.iceberg.relocation import raw_path
from dlac_pipeline.lakehouse.ledger.schemas import TABLES

LARGE_ROWS = 250_000
"""Rows from which a table is not read as a whole."""
_GLOBBING = re.compile(r"[*?\[\]]")
"""Characters for which DuckDB looks for other files than the named one."""
_RELATIONS = {EqualTo: "=", GreaterThan: ">", LessThanOrEqual: "<="}


def is_large(table: Table) -> bool:
    """Return whether the current snapshot of a table has many rows."""
    snapshot = table.current_snapshot()
    summary = None if snapshot is None else snapshot.summary
    return summary is not None and int(summary["total-records"] or 0) > LARGE_ROWS


def read_large(scan: DataScan, table: Table, warehouse: str, here: Callable[[str], str]) -> Any:
    """Return the rows of a scan of an own table as an Arrow table, read by DuckDB, or None if it cannot read a file.

    Raises:
        FileNotFoundError: a file is missing.
    """
    rows = rows_in_files(plan_files(table, scan.row_filter), table, scan.row_filter, warehouse, here)
    if rows is None:
        return None
    import duckdb  # it takes 0.2 s, and few processes read a large table

    schema: Any = schema_to_pyarrow(scan.projection(), include_field_ids=False)
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        query = f"SELECT {', '.join(schema.names)} FROM ({rows})"
        found: Any = connection.sql(query).to_arrow_table()
    return found.cast(schema)


def plan_files(table: Table, wanted: BooleanExpression) -> list[FileScanTask]:
    """Return the data files of an own table that may have wanted rows: those of the partition that the first condition names.

    The tables have no metrics, by which further conditions would leave out files.
    """
    while isinstance(wanted, And):
        wanted = wanted.left
    return list(table.scan(wanted).plan_files())


def rows_in_files(
    tasks: Sequence[FileScanTask], table: Table, wanted: BooleanExpression, warehouse: str, here: Callable[[str], str]
) -> str | None:
    """Return a query for rows of an own table in data files, or None if DuckDB cannot read one of them.

    `here` returns the present place of a recorded path. Raises `FileNotFoundError` if a file is missing.
    """
    folders, paths, name = local_paths(warehouse), [], table.name()[-1]
    for task in tasks:
        path = here(raw_path(task.file.file_path) or "")
        if not any(path.startswith(f"{each}/") for each in folders) or task.delete_files or _GLOBBING.search(path):
            return None
        if not os.path.exists(path):
            raise FileNotFoundError(path)
        paths.append(path)
    if not paths:
        return no_rows(name)
    # older files lack newer columns
    files = f"read_parquet([{sql_literals(sorted(paths))}], union_by_name = true, hive_partitioning = false)"
    return f"{no_rows(name)} UNION ALL BY NAME FROM {files} WHERE {_condition(wanted)}"


@cache
def no_rows(name: str) -> str:
    """Return a query with the columns of one of DLAC's tables, and no row."""
    import duckdb

    schema, _ = TABLES[name]
    empty: Any = schema_to_pyarrow(schema, include_field_ids=False).empty_table()
    with duckdb.connect() as connection:
        connection.register("empty", empty)
        columns = connection.execute("DESCRIBE empty").fetchall()
    return f"SELECT {', '.join(f'NULL::{kind} AS {column}' for column, kind, *_ in columns)} WHERE false"


def local_paths(address: str) -> list[str]:
    """Return the local path of an address as it is written and as it is resolved. Empty for an address elsewhere."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme != "file":
        return []
    path = "/" + (rest if colon else address).lstrip("/")
    return sorted({path, str(Path(path).resolve())})


def sql_literals(values: Iterable[str | int]) -> str:
    """Return values as literals of SQL, with commas between them."""
    return ", ".join(str(each) if isinstance(each, int) else "'" + each.replace("'", "''") + "'" for each in values)


def _condition(wanted: BooleanExpression) -> str:
    """Return one of the expressions with which own tables are read as SQL."""
    if isinstance(wanted, And):
        return f"{_condition(wanted.left)} AND {_condition(wanted.right)}"
    found: Any = wanted  # the hidden signatures of pyiceberg's pydantic bases
    if isinstance(wanted, In):
        return f"{found.term.name} IN ({sql_literals(sorted(each.value for each in found.literals))})"
    if type(wanted) in _RELATIONS:
        return f"{found.term.name} {_RELATIONS[type(wanted)]} {sql_literals([found.literal.value])}"
    return "true" if isinstance(wanted, AlwaysTrue) else "false"
