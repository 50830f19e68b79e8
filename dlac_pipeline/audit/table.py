"""An audit as a table for the terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from dlac_pipeline.audit.audit import AuditReport


def audit_table(report: AuditReport) -> Table:
    """Return the report as a Rich table of two columns: the item, and its count. Problems come last."""
    table = Table(title=Text(f"Audit of run {report.run}"), show_header=False, title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("value", justify="right", overflow="fold")
    for what, value in _lines(report):
        table.add_row(what, Text(value))  # names and paths are no markup
    table.add_section()
    table.add_row("exact", Text("yes", style="green") if report.exact else Text("NO", style="bold red"))
    for problem in report.problems:
        table.add_row(Text("problem", style="red"), Text(problem, justify="left"))
    return table


def _lines(report: AuditReport) -> list[tuple[str, str]]:
    state = "finished" if report.finished else "unfinished"
    before = [] if report.adopted_from is None else [("seen before", f"unknown: adopted from {report.adopted_from}")]
    if report.forked_from is not None:
        before = [("seen before", f"what its parent {report.forked_from} has seen")]
    return [
        ("head checkpoint", report.head_checkpoint or "none"),
        *before,
        ("step", f"{report.step:,} ({state})"),
        ("attempts", f"{report.attempts:,}"),
        ("recoveries", f"{report.recoveries:,}"),
        ("checkpoints", f"{report.checkpoints:,} ({report.checkpoints_abandoned:,} abandoned)"),
        ("passes", f"{report.passes_finished:,} finished of {report.passes_entered:,} entered"),
        ("live rows of a pass", f"{report.rows_live:,}"),
        ("rows consumed", f"{report.rows_consumed:,}"),
        ("rows duplicated", f"{report.rows_duplicated:,}"),
        ("rows missing", f"{report.rows_missing:,}"),
        ("rows pending", f"{report.rows_pending:,}"),
        ("rows partial", f"{report.rows_partial:,}"),
        ("rows not applied", f"{report.rows_not_applied:,}"),
        ("rows filtered", f"{report.rows_filtered:,}"),
        ("rows quarantined", f"{report.rows_quarantined:,}"),
        ("rows excluded", f"{report.rows_excluded:,}"),
    ]
