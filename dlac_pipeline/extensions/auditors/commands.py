"""The command `dlac sql`."""

import sys
from collections.abc import Iterable, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from dlac_pipeline.cli import shared as ui
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.plain_json import strict_json

if TYPE_CHECKING:
    import duckdb

    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

PANEL = "Audit"
MACROS = Door("dlac.macros", "macro")
"""Entries define the macro of their name in a connection, for the calls in a query. The name is in lower case."""


@ui.extension_command(
    'dlac sql "FROM checkpoints"',
    "dlac sql \"SELECT step, list_last(losses) AS loss FROM lineage WHERE run = 'my-run'\" --json",
    "dlac sql @catalog/queries/problems.sql",
    "dlac sql --database ledger.duckdb",
)
def sql(
    query: Annotated[
        str, Argument(help='SQL in DuckDB\'s dialect, e.g. "FROM checkpoints", or @FILE; optional with --database.')
    ] = "",
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
    allow_files: Annotated[
        bool, Option("--allow-files", help="Let the SQL read and write any file, and load DuckDB's extensions.")
    ] = False,
    database: Annotated[
        Path | None,
        Option(help="Write the tables, views and macros to this new DuckDB file, which is read without DLAC."),
    ] = None,
) -> None:
    """Query the tables, the views of the audit, and its macros consumed(file, row, checkpoint) and touched(...).

    SQL reads files of a local warehouse and data files that plans name. It writes none.
    """
    import duckdb

    from dlac_pipeline.audit.lakehouse_sql import open_audit
    from dlac_pipeline.extensions.auditors.queries import write_database

    query = _read_query(query)
    lakehouse = ui.lakehouse_of(spec, home)
    if database is not None:
        write_database(lakehouse, database)
        if not query:
            return

    def ask(connection: duckdb.DuckDBPyConnection) -> tuple[list[str], list[Any]]:
        with connection:
            for name in MACROS.points():
                if name in query.casefold():
                    define = MACROS.load(name, setting="SQL")
                    define(connection, lakehouse, query, lambda run: ui.given_spec(run, spec, home))
            return _answer(connection, lakehouse, query, allow_files)

    try:
        try:
            names, rows = ask(open_audit(lakehouse, query=None if allow_files else query))
        except duckdb.CatalogException:
            if allow_files:
                raise
            # It has written no file. Among all names DuckDB finds one to suggest.
            names, rows = ask(open_audit(lakehouse))
    except duckdb.Error as err:
        raise SpecInvalid(f"expected a query that DuckDB can answer, found {query!r}: {err}{_advice(err)}") from err
    if as_json:
        sys.stdout.write(strict_json([dict(zip(names, row, strict=True)) for row in rows], default=_json_value) + "\n")
    else:
        show_rows(names, rows)


def show_rows(names: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table, or a block for each row, a field per line, where it would be wider than the terminal. None is NULL."""
    null = Text("NULL", style="dim")
    cells = [[null if value is None else ui.plain_text(value) for value in row] for row in rows]
    table = Table()
    for name in names:
        table.add_column(ui.plain_text(name))
    for row in cells:
        table.add_row(*row)
    if ui.OUT.measure(table, options=ui.OUT.options.update(width=ui.WIDE)).maximum <= ui.OUT.width:
        ui.OUT.print(table)
    else:
        ui.show_blocks(zip(map(ui.terminal_text, names), (cell.plain for cell in row), strict=True) for row in cells)


def _answer(
    connection: "duckdb.DuckDBPyConnection", lakehouse: "Lakehouse", query: str, allow_files: bool
) -> tuple[list[str], list[Any]]:
    """Return the column names and rows of the answer."""
    from dlac_pipeline.extensions.auditors.queries import check_reads_only, lock_to_lakehouse

    if not connection.extract_statements(query):
        raise SpecInvalid(f'expected a query such as "FROM checkpoints", found {query!r}')
    if not allow_files:
        check_reads_only(connection, query)
        lock_to_lakehouse(connection, lakehouse)
    result = connection.execute(query)
    return [column[0] for column in result.description or []], result.fetchall()


def _read_query(query: str) -> str:
    """Return a query, or the text of its `@FILE`."""
    try:
        return Path(query[1:]).read_text() if query.startswith("@") else query
    except (OSError, UnicodeDecodeError) as err:
        raise SpecInvalid(f"expected a file of SQL, found {query!r}: {err}") from err


def _advice(err: Exception) -> str:
    """Return advice on a file that SQL may not read. DuckDB only reports that it is disabled."""
    kept_out = "disabled" in str(err) or "external" in str(err)
    return "; files outside of the lakehouse are read with --allow-files" if kept_out else ""


def _json_value(value: object) -> object:
    """Return a value of a type that JSON lacks: decimals as numbers, all else as text."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)
