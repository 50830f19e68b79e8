"""An audit as a table for the terminal."""

from dataclasses import fields

from rich.table import Table
from rich.text import Text

from dlac_pipeline.audit.audit import AuditReport

_COUNTS = [each.name for each in fields(AuditReport) if each.name.startswith("rows_") and each.name != "rows_live"]


def audit_table(report: AuditReport) -> Table:
    """Return the report as a Rich table of two columns: the item, and its count. Problems come last."""
    table = Table(title=Text(f"Audit of run {report.run}"), show_header=False, title_justify="left")
    table.add_column("what", style="bold")
    table.add_column("value", justify="right", overflow="fold")
    for what, value in _lines(report):
        table.add_row(what, Text(value))  # names and paths are no markup
    table.add_section()
    table.add_row("exact", _verdict(report))
    for problem in report.problems:
        table.add_row(Text("problem", style="red"), Text(problem, justify="left"))
    return table


def _verdict(report: AuditReport) -> Text:
    if not report.exact:
        return Text("NO", style="bold red")
    is_empty = not report.checkpoints and report.head_checkpoint is None
    return Text("nothing was trained", style="yellow") if is_empty else Text("yes", style="green")


def _lines(report: AuditReport) -> list[tuple[str, str]]:
    state = "finished" if report.finished else "unfinished"
    before = [] if report.adopted_from is None else [("seen before", f"unknown: adopted from {report.adopted_from}")]
    if report.forked_from is not None:
        before = [("seen before", f"what its parent {report.forked_from} has seen")]
    return [
        ("head checkpoint", report.head_checkpoint or "none"),
        *([] if report.recorded_checkpoint is None else [("audited before, up to", report.recorded_checkpoint)]),
        *before,
        ("step", f"{report.step:,} ({state})"),
        ("attempts", f"{report.attempts:,}"),
        ("recoveries", f"{report.recoveries:,}"),
        ("checkpoints", f"{report.checkpoints:,} ({report.checkpoints_abandoned:,} abandoned)"),
        ("passes", f"{report.passes_finished:,} finished of {report.passes_entered:,} entered"),
        ("live rows of a pass", f"{report.rows_live:,}"),
        *((name.replace("_", " "), f"{getattr(report, name):,}") for name in _COUNTS),
    ]
