"""Rows into a source table by a few appends, exactly once: a `Batchwise` in, the number of rows appended out.

How far an ingestion is stands in the table's properties, set by the very transaction that appends the rows. A killed
ingestion is continued behind its last append; one that lost a race to another looks again and continues behind that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pyiceberg.exceptions import TableAlreadyExistsError
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.retrying import retrying

BEGUN_PROPERTY = "dlac.ingest.begun"
"""Digest of what the table is being filled with; set by the first append."""
COMPLETE_PROPERTY = "dlac.ingest.complete"
"""Digest of what the table holds; set by the last append."""
ROWS_PROPERTY = "dlac.ingest.rows"
"""Rows of the ingestion that are in the table; set by every append."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batchwise:
    """What a table is to hold: `rows_of(first, end)` gives the rows first..end-1 of `rows` as an Arrow table."""

    digest: str
    schema: Schema
    rows: int
    rows_of: Callable[[int, int], Any]
    table_properties: Mapping[str, str] = field(default_factory=dict)
    """Set when the table is created."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Properties set together with every append."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Appended:
    """What one call did: nothing, where the table already held everything."""

    appends: int
    rows: int


def complete_digest(table: Table) -> str | None:
    """Digest of the finished ingestion that the table holds, if it holds one."""
    return table.properties.get(COMPLETE_PROPERTY)


def rows_there(table: Table, identifier: str, digest: str) -> int:
    """How many rows of the ingestion with this digest the table holds.

    Raises:
        SpecInvalid: the table holds something else.
    """
    begun = table.properties.get(BEGUN_PROPERTY)
    if begun is None and table.current_snapshot() is None:
        return 0
    if begun != digest:
        found = "rows of another origin" if begun is None else f"ingestion {begun!r}"
        raise SpecInvalid(
            f"expected table {identifier!r} to be empty or to hold ingestion {digest!r}, found {found}: "
            "name another table, or drop this one"
        )
    return int(table.properties[ROWS_PROPERTY])


def append_batchwise(
    lakehouse: Lakehouse, identifier: str, content: Batchwise, *, appends: int, progress: Progress | None = None
) -> Appended:
    """Bring `content` into the table in `appends` contiguous parts, continuing behind what is there.

    Args:
        progress: Called after every append with (rows in the table, rows in all).

    Raises:
        SpecInvalid: the table holds something else, or `appends` does not fit the number of rows.
        LakehouseError: the warehouse cannot be written.
        CatalogUnreachable: the catalog stayed away for a minute.
    """
    if not 1 <= appends <= content.rows:
        raise SpecInvalid(f"expected between 1 and {content.rows} appends for {content.rows} rows, found {appends!r}")
    tries = retrying()
    create_source_table(lakehouse, identifier, content.schema, content.table_properties)
    done_appends = done_rows = 0
    while span := tries(_append_next, lakehouse, identifier, content, appends):
        done_appends, done_rows = done_appends + 1, done_rows + span[1] - span[0]
        if progress is not None:
            progress(span[1], content.rows)
    return Appended(appends=done_appends, rows=done_rows)


def create_source_table(lakehouse: Lakehouse, identifier: str, schema: Schema, properties: Mapping[str, str]) -> None:
    """Create the table and its namespace unless they exist; safe to race."""
    lakehouse.create_namespace(identifier.rpartition(".")[0])
    with reachable(lakehouse.config.uri):
        if lakehouse.catalog.table_exists(identifier):
            return
        try:
            lakehouse.catalog.create_table(
                identifier, schema, properties={"commit.retry.num-retries": "0", **properties}
            )
        except TableAlreadyExistsError:
            return


def _append_next(lakehouse: Lakehouse, identifier: str, content: Batchwise, appends: int) -> tuple[int, int] | None:
    """Append the part that follows what is there; returns its (first, end), or None when nothing is missing.

    The properties are read from the table object on which the append is built: if anybody appends in between, the
    append is refused, and the next try reads again.
    """
    table = lakehouse.load(identifier)
    first = rows_there(table, identifier, content.digest)
    if first == content.rows:
        return None
    end = next(end for part in range(1, appends + 1) if (end := content.rows * part // appends) > first)
    properties = {BEGUN_PROPERTY: content.digest, ROWS_PROPERTY: str(end), **content.facts}
    if end == content.rows:
        properties[COMPLETE_PROPERTY] = content.digest
    rows = content.rows_of(first, end).cast(schema_to_pyarrow(content.schema, include_field_ids=False))
    with reachable(lakehouse.config.uri), table.transaction() as transaction:
        transaction.append(rows)
        transaction.set_properties(properties)
    return first, end
