"""Rows of plans that an exclusion matches, as tables for DuckDB."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import duckdb
import pyarrow as pa
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.iceberg.row_groups import FilesToRead, row_groups_of

NO_PLACES = pa.schema({"plan_id": pa.string(), "file_path": pa.string(), "row": pa.int64()}).empty_table()
"""No row of a plan."""


def excluded_places(
    connection: duckdb.DuckDBPyConnection, table: Table, where: Sequence[str], plans: Mapping[str, Any]
) -> pa.Table:
    """Return the rows (plan_id, file_path, row) that an expression matches, of `plan_ids` of a `snapshot_id` and `schema_id`.

    Rows that the snapshot has deleted are among them. They are dead in these plans.
    """
    query = "SELECT DISTINCT file_path FROM units WHERE list_contains($1, plan_id)"
    paths = {path for (path,) in connection.execute(query, [plans["plan_ids"]]).fetchall()}
    schema, parts = table.schemas()[plans["schema_id"]], [NO_PLACES]
    groups = row_groups_of(table, plans["snapshot_id"], "", schema=schema, reads=FilesToRead(only=paths), exclude=where)
    for group, plan_id in product(groups, plans["plan_ids"]):
        names = [pa.repeat(each, len(group.dead)) for each in (plan_id, group.file_path)]
        parts.append(pa.table([*names, group.first_row + group.dead], schema=NO_PLACES.schema))
    return pa.concat_tables(parts)
