"""The command `dlac audit`."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

import dlac_pipeline as dlac
from dlac_pipeline.cli import shared as ui

PANEL = "Audit"


@ui.extension_command(
    "dlac audit my-run",
    "dlac audit my-run --checkpoint 400",
    "dlac audit my-run --record my-run.audit",
    "dlac audit my-run --explain > audit.sql",
    "dlac audit my-run --explain --iceberg > audit.sql",
)
def audit(
    run: ui.RunName,
    home: ui.Home = None,
    spec: ui.SpecOption = None,
    as_json: ui.AsJson = False,
    explain: Annotated[bool, Option(help="Print SQL that proves the same in a plain DuckDB, without DLAC.")] = False,
    iceberg: Annotated[bool, Option(help="Print it for DuckDB's Iceberg extension, not Parquet files.")] = False,
    checkpoint: Annotated[
        str | None,
        Option(help="Id or step of a checkpoint. Audit the run as it was with that head. Unset: the present head."),
    ] = None,
    record: Annotated[
        Path | None,
        Option(
            help="Your file. Audit only what came since the exact audit that it records, and record this one in it."
        ),
    ] = None,
) -> None:
    """Prove from the tables what the run has consumed. Exit status 0 only if it is exact.

    It audits the surviving lineage, or that of another head on a branch that a rewind has abandoned.
    """
    from dlac_pipeline.audit.audit import audit_run
    from dlac_pipeline.audit.table import audit_table
    from dlac_pipeline.extensions.auditors.record import audit_since

    lakehouse = ui.lakehouse_of(spec, home)
    if explain or iceberg:
        sys.stdout.write(dlac.explain_sql(lakehouse, run, checkpoint, iceberg=iceberg))
        return
    report = audit_since(lakehouse, run, checkpoint, record=record) if record else audit_run(lakehouse, run, checkpoint)
    if as_json:
        ui.show_json(report.to_json())
    else:
        ui.OUT.print(audit_table(report))
    if not report.exact:
        raise typer.Exit(1)
