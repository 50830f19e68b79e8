"""Rows of plans whose snapshots are gone, found by their keys where filters name values of the identity columns."""

from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from itertools import product
from typing import Any
from uuid import UUID

import duckdb
import pyarrow as pa
from pyiceberg.expressions import And
from pyiceberg.table import Table
from pyiceberg.types import DateType, IntegerType, LongType, StringType, UUIDType

from dlac_pipeline.audit.lakehouse_sql import NO_PLACES, sql_script
from dlac_pipeline.lakehouse.filters.conditions import Combination, Condition, IsAmong
from dlac_pipeline.lakehouse.iceberg.connect import NO_KEY, Lakehouse, among, equals
from dlac_pipeline.lakehouse.iceberg.row_groups import parse_exclusion

_Values = dict[str, str]
"""Column -> text of its value."""
_TEXTS: dict[type, Any] = {
    **dict.fromkeys((IntegerType, LongType, StringType), str),
    UUIDType: lambda value: str(UUID(bytes=value)),
    DateType: lambda value: str(date(1970, 1, 1) + timedelta(days=value)),
}
_UNKEYED = """
SELECT count(DISTINCT u.file_path) FROM units AS u
WHERE list_contains($1, u.plan_id) AND NOT EXISTS (FROM keyed_files AS f, (SELECT unnest($2::VARCHAR[]) AS identity) AS wanted
    WHERE f.file_path = u.file_path AND f.identity = wanted.identity)
"""
_PLACES = """
SELECT DISTINCT u.plan_id, u.file_path, k.row
FROM keyed AS k JOIN keyed_files AS f ON f.file = k.file JOIN units AS u
    ON u.file_path = f.file_path AND k.row >= u.first_row AND k.row < u.first_row + u.rows
WHERE list_contains($1, u.plan_id)
"""


def keyed_places(
    connection: duckdb.DuckDBPyConnection,
    lakehouse: Lakehouse,
    table: Table,
    filters: Sequence[str],
    plans: Mapping[str, Any],
) -> pa.Table | None:
    """Return the rows (plan_id, file_path, row) of `plan_ids` that filters match. None if the keys do not show them.

    They do if each filter names all columns of an identity, by values, and each data file of the plans has keys of it.
    """
    named = And(equals("table_uuid", str(table.metadata.table_uuid)), NO_KEY)
    connection.register("named", lakehouse.read_own("row_keys", named))
    connection.execute("CREATE OR REPLACE TABLE row_keys AS FROM named")
    for name in ("row_key", "identity_text", "keyed_files", "keys_of"):
        connection.execute(sql_script(name))
    schema, keys = table.schemas()[plans["schema_id"]], set[int]()
    for each in filters:
        values = _values_in(parse_exclusion(each, schema, table)[1])
        if values is None:
            return None
        # each part of an OR needs keys of its own columns in every file
        for identities in {tuple(sorted(_add_keys(connection, one, keys))) for one in values}:
            [(unkeyed,)] = connection.execute(_UNKEYED, [plans["plan_ids"], list(identities)]).fetchall()
            if unkeyed:
                return None
    connection.register("keyed", lakehouse.read_own("row_keys", among("key", sorted(keys))))
    places: Any = connection.sql(_PLACES, params=[plans["plan_ids"]]).to_arrow_table()
    return pa.table(places).cast(NO_PLACES.schema)


def _add_keys(connection: duckdb.DuckDBPyConnection, values: _Values, keys: set[int]) -> list[str]:
    """Add the keys of rows with these values. Return the identities whose columns they all are."""
    query = "SELECT DISTINCT identity, json_keys(identity) FROM keyed_files"
    fitting = [each for each in connection.execute(query).fetchall() if set(each[1]) == values.keys()]
    for identity, columns in fitting:
        texts = [values[name] for name in columns]
        found = connection.execute("SELECT key FROM keys_of($1) WHERE identity = $2", [texts, identity]).fetchall()
        keys.update(key for (key,) in found)
    return [identity for identity, _ in fitting]


def _values_in(condition: Condition) -> list[_Values] | None:
    """Return the values of columns for which a condition is true, or None if it is another kind of condition."""
    if isinstance(condition, IsAmong) and not condition.negated and type(condition.path.kind) in _TEXTS:
        text = _TEXTS[type(condition.path.kind)]
        return [{condition.path.name: text(value)} for value in condition.members]
    if not isinstance(condition, Combination):
        return None
    parts = [_values_in(each) for each in condition.parts]
    known = [each for each in parts if each is not None]
    if len(known) < len(parts):
        return None
    if not condition.every:
        return [each for part in known for each in part]
    pairs = [{pair for one in each for pair in one.items()} for each in product(*known)]
    return [dict(each) for each in pairs if len(dict(each)) == len(each)]  # a column has one value
