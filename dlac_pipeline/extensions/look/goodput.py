"""Goodput of a run: its effective training time ratio, and its time by cause, by the view `goodput`."""

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import duckdb
import pyarrow as pa

from dlac_pipeline.audit.lakehouse_sql import define_views, names_in, rows_of, scripts_of
from dlac_pipeline.lakehouse.ledger.arrow_rows import CONSUMPTION_ARROW
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, recoveries_to_arrow
from dlac_pipeline.lakehouse.ledger.typed_rows import LedgerRow

_QUERY = "SELECT * EXCLUDE (run, began_at, ended_at) FROM goodput WHERE run = ?"


def read_goodput(connection: duckdb.DuckDBPyConnection, run: str) -> dict[str, float | None] | None:
    """Return the row of `goodput` of a run from an audit connection, or None for a run without a claim."""
    found = rows_of(connection, _QUERY, [run])
    return {name: None if value is None else float(value) for name, value in found[0].items()} if found else None


def read_attempt_times(connection: duckdb.DuckDBPyConnection, run: str) -> list[dict[str, Any]]:
    """Return the rows of `attempt_times` of a run from an audit connection, the oldest attempt first."""
    found = rows_of(connection, "SELECT * EXCLUDE (run) FROM attempt_times WHERE run = ? ORDER BY attempt", [run])
    return [{name: float(each) if isinstance(each, Decimal) else each for name, each in row.items()} for row in found]


def goodput_of_rows(rows: Sequence[LedgerRow], recoveries: Sequence[Recovery]) -> dict[str, float | None] | None:
    """Return the goodput of the run that has these rows."""
    with open_rows(rows, recoveries) as connection:
        return read_goodput(connection, rows[0].run)


def open_rows(rows: Sequence[LedgerRow], recoveries: Sequence[Recovery]) -> duckdb.DuckDBPyConnection:
    """Open a connection with `goodput` and the views below it, over rows of the ledger in memory. They need no advances."""
    columns = [{**row.to_columns(), "losses": None} for row in rows]  # the views need no losses, and they are many
    connection = duckdb.connect()
    connection.register("consumption", pa.Table.from_pylist(columns, schema=CONSUMPTION_ARROW))
    connection.register("recoveries", recoveries_to_arrow(recoveries))
    scripts = scripts_of(names_in("goodput"))
    define_views(connection, scripts, scripts)  # as tables, because DuckDB binds the whole tree below a view
    return connection
