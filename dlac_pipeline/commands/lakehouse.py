"""The lakehouse: audit, SQL, pins, upkeep."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from decimal import Decimal
from typing import Annotated

import typer
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from catalog.errors import SpecInvalid
from catalog.lakehouse_config import KEEP_SNAPSHOTS
from dlac_pipeline.commands.shared import (
    OUT,
    AsJson,
    Home,
    RunName,
    SpecOption,
    ago,
    lakehouse_of,
    show_rows,
)

app = typer.Typer()


@app.command()
def audit(
    run: RunName,
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
    explain: Annotated[bool, typer.Option(help="Print SQL that answers without DLAC, in a plain DuckDB.")] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Id or step of a checkpoint: audit the run as it was when this was its head; unset: as it is now."
        ),
    ] = None,
) -> None:
    """Prove from the tables what the run has consumed; exit status 0 only if it is exact.

    The surviving lineage is audited, or that of any other head: a branch that a rewind has left.
    """
    from dlac_pipeline.audit.audit import audit_run
    from dlac_pipeline.audit.explain import explain_sql
    from dlac_pipeline.audit.table import audit_table

    lakehouse = lakehouse_of(spec, home)
    if explain:
        sys.stdout.write(explain_sql(lakehouse, run, checkpoint))
        return
    report = audit_run(lakehouse, run, checkpoint)
    if as_json:
        sys.stdout.write(json.dumps(report.to_json(), default=str) + "\n")
    else:
        OUT.print(audit_table(report))
    if not report.exact:
        raise typer.Exit(1)


@app.command()
def sql(
    query: Annotated[str, typer.Argument(help='SQL in DuckDB\'s dialect, e.g. "FROM checkpoints".')],
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
) -> None:
    """Ask the lakehouse: the tables, the views of the audit, and its macros consumed(file, row, checkpoint), touched(...)."""
    import duckdb

    from dlac_pipeline.audit.lakehouse_sql import open_audit

    with open_audit(lakehouse_of(spec, home)) as connection:
        try:
            if not connection.extract_statements(query):
                raise SpecInvalid(f'expected a query such as "FROM checkpoints", found {query!r}')
            result = connection.execute(query)
            names = [column[0] for column in result.description or []]
            rows = result.fetchall()
        except duckdb.Error as err:
            raise SpecInvalid(f"expected a query that DuckDB can answer, found {query!r}: {err}") from err
    if as_json:
        sys.stdout.write(json.dumps([dict(zip(names, row, strict=True)) for row in rows], default=_json_value) + "\n")
        return
    show_rows(names, rows)


@app.command()
def pins(
    name: Annotated[str | None, typer.Argument(help="A run or a table; unset: every pin.")] = None,
    home: Home = None,
    spec: SpecOption = None,
    as_json: AsJson = False,
) -> None:
    """The tags that keep planned snapshots alive: their age, who needs them, and what only they hold back from expiry."""
    from catalog.pins import pins_table

    found = pins_table(lakehouse_of(spec, home), name)
    if as_json:
        sys.stdout.write(json.dumps([asdict(pin) for pin in found], default=str) + "\n")
        return
    table = Table("table")
    table.add_column("snapshot", no_wrap=True, min_width=19)
    for name_of_column in ("made", "pinned", "needed by", "other runs", "files held", "bytes held"):
        table.add_column(name_of_column)
    for pin in found:
        others = ", ".join(use.run for use in pin.uses if not use.needed)
        pinned = "" if pin.pinned_at is None else ago(pin.pinned_at)
        facts = (pin.snapshot_id, ago(pin.committed_at), pinned, ", ".join(pin.needed_by), others, pin.held_files)
        table.add_row(*(Text(str(fact)) for fact in (pin.table, *facts)), Text(decimal(pin.held_bytes)))
    OUT.print(table)


@app.command()
def unpin(
    table: Annotated[str, typer.Argument(help="The source table, as namespace.table.")],
    snapshot_id: Annotated[int, typer.Argument(help="The pinned snapshot, as `dlac pins` shows it.")],
    home: Home = None,
    spec: SpecOption = None,
    force: Annotated[
        bool, typer.Option(help="Even if a run needs it; that run cannot resume, or be rewound, then.")
    ] = False,
) -> None:
    """Let go of a pinned snapshot: expiry may then remove what only this pin held back."""
    from catalog.pins import unpin as let_go

    removed = let_go(lakehouse_of(spec, home), table, snapshot_id, force=force)
    OUT.print(
        f"snapshot {snapshot_id} of {table} {'is not pinned any more' if removed else 'was not pinned'}", markup=False
    )


@app.command()
def upkeep(
    home: Home = None,
    spec: SpecOption = None,
    keep: Annotated[int, typer.Option(min=1, help="Snapshots to keep of each of DLAC's own tables.")] = KEEP_SNAPSHOTS,
    as_json: AsJson = False,
) -> None:
    """Put DLAC's own tables in order: merge small files, expire snapshots, remove unneeded files; safe while runs train."""
    from catalog.upkeep import upkeep as put_in_order

    done = put_in_order(lakehouse_of(spec, home), keep=keep)
    if as_json:
        sys.stdout.write(json.dumps([asdict(each) for each in done]) + "\n")
        return
    table = Table("table", "files merged", "into", "snapshots expired", "files removed", "bytes removed")
    table.columns[0].no_wrap = True
    for each in done:
        name = f"{each.table} (busy)" if each.busy else each.table
        facts = (name, each.merged_files, each.into_files, each.expired_snapshots, each.removed_files)
        table.add_row(*(Text(str(fact)) for fact in facts), Text(decimal(each.removed_bytes)))
    OUT.print(table)
    if any(each.busy for each in done):
        OUT.print("busy: others committed so often that something was left for the next time", soft_wrap=True)


def _json_value(value: object) -> object:
    """What JSON has no type for: decimals as numbers, all else as text."""
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)
