"""Appends to a source table, a few and each exactly once: a `Batchwise` in, the number of rows appended out.

The table's properties hold the progress of an ingestion. The transaction that appends the rows sets them. A killed ingestion
continues after its last append. One that lost a race reads again and continues after the winner's append.
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
"""Digest of the content that fills the table. The first append sets it."""
COMPLETE_PROPERTY = "dlac.ingest.complete"
"""Digest of the table's complete content. The last append sets it."""
ROWS_PROPERTY = "dlac.ingest.rows"
"""Rows of the ingestion that are in the table. Every append sets it."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Batchwise:
    """Intended content of a table: `rows_of(first, end)` gives the rows first..end-1 of `rows` as an Arrow table."""

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
    """Result of one call: nothing, if the table had the whole content already."""

    appends: int
    rows: int


def complete_digest(table: Table) -> str | None:
    """Digest of the finished ingestion that the table holds, if it holds one."""
    return table.properties.get(COMPLETE_PROPERTY)


def rows_there(table: Table, identifier: str, digest: str) -> int:
    """Return the number of rows of the ingestion with this digest that the table holds.

    Raises:
        SpecInvalid: the table contains something else.
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
    """Append `content` to the table in `appends` contiguous parts, after the rows that exist.

    Args:
        progress: Called after every append with (rows in the table, rows in all).

    Raises:
        SpecInvalid: the table contains something else, or `appends` does not fit the number of rows.
        LakehouseError: the warehouse cannot be written.
        CatalogUnreachable: the catalog was unavailable for a minute.
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
    """Create the table and its namespace unless they exist. Safe to race."""
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
    """Append the next part. Return its (first, end), or None when nothing is missing.

    The properties are read from the table object on which the append is built. If another process appends in between, the
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
