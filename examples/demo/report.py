"""Report on a disturbed run beside an undisturbed one: `report.json` for programs, `report.html` for people.

The HTML contains everything that it shows, so it can be mailed.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from dlac_pipeline.audit.audit import AuditReport, audit_open_run, open_run
from dlac_pipeline.audit.lakehouse_sql import rows_of
from dlac_pipeline.extensions.look.losses import LossCurve, differing_steps, read_losses
from dlac_pipeline.extensions.look.plots import draw_coverage, draw_goodput, draw_losses
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.recoveries import PHASES, Recovery
from dlac_pipeline.lakehouse.plain_json import strict_json

REPORT_VERSION = 1
_MOST_STEPS = 20
_UNCOVERED = (
    "SELECT count(*) AS row_groups FROM coverage "
    "WHERE run = ? AND (rows_consumed + rows_passed <> live_rows OR rows_repeated > 0)"
)


def write_report(
    lakehouse: Lakehouse, runs: Mapping[str, str], folder: Path, timings: Mapping[str, float]
) -> dict[str, Any]:
    """Write report.json and report.html into `folder`. Return the content of the former.

    `runs` names the runs that are "reference" and "faulty". `timings` are seconds by activity.

    Raises:
        NoSuchRun: the ledger has no row of one of them.
        BadInput: matplotlib is not installed.
    """
    curves, audits, uncovered, coverage, goodput = {}, {}, {}, b"", b""
    for role in ("reference", "faulty"):
        with open_run(lakehouse, runs[role]) as connection:
            curves[role] = read_losses(connection, runs[role])
            audits[role] = audit_open_run(lakehouse, connection, runs[role])
            uncovered[role] = rows_of(connection, _UNCOVERED, [runs[role]])[0]["row_groups"]
            coverage = draw_coverage(connection, runs[role])  # the last is that of the faulty run
            goodput = draw_goodput(connection, runs[role])
    content = _content(curves, audits, uncovered, timings)
    page = _page(content, losses=draw_losses(list(curves.values())), coverage=coverage, goodput=goodput)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.html").write_text(page)
    (folder / "report.json").write_text(strict_json(content, indent=2) + "\n")
    return content


def _content(
    curves: Mapping[str, LossCurve],
    audits: Mapping[str, AuditReport],
    uncovered: Mapping[str, int],
    timings: Mapping[str, float],
) -> dict[str, Any]:
    reference, faulty = curves["reference"], curves["faulty"]
    differing = differing_steps(reference, faulty)
    compared = len(reference.losses.keys() & faulty.losses.keys())
    content = {
        "report_version": REPORT_VERSION,
        "runs": {role: curve.run for role, curve in curves.items()},
        "losses_identical": compared > 0 and not differing,
        "steps_compared": compared,
        "steps_differing": differing[:_MOST_STEPS],
        "rows_consumed_once": all(_whole(audit) and not uncovered[role] for role, audit in audits.items()),
        "no_row_twice": all(audit.rows_duplicated == 0 for audit in audits.values()),
        "no_row_missing": all(audit.rows_missing == 0 for audit in audits.values()),
        "audits_exact": all(audit.exact for audit in audits.values()),
        "runs_finished": all(audit.finished for audit in audits.values()),
        "audits": {role: audit.to_json() for role, audit in audits.items()},
        "recoveries": [_plain(recovery) for recovery in faulty.recoveries],
        "timings": dict(timings),
    }
    verdicts = (
        "losses_identical",
        "rows_consumed_once",
        "no_row_twice",
        "no_row_missing",
        "audits_exact",
        "runs_finished",
    )
    return {"ok": all(content[name] for name in verdicts), **content}


def _whole(audit: AuditReport) -> bool:
    """Return True if every row of every pass that was entered is consumed, and none twice."""
    return (
        audit.passes_entered > 0
        and audit.passes_finished == audit.passes_entered
        and audit.rows_duplicated == audit.rows_missing == audit.rows_pending == 0
    )


def _plain(recovery: Mapping[str, Any]) -> dict[str, Any]:
    return {**recovery, "failed_at": recovery["failed_at"].isoformat()}


def _page(content: Mapping[str, Any], *, losses: bytes, coverage: bytes, goodput: bytes) -> str:
    reference, faulty = (html.escape(content["runs"][role]) for role in ("reference", "faulty"))
    template = Template((files(__package__) / "report.html").read_text())
    return template.substitute(
        title=f"Run {faulty} beside {reference}",
        summary=f"{faulty} was disturbed while it trained, {reference} was not. "
        "All below is read from the tables of the lakehouse and its data files.",
        verdict="Nothing was lost and nothing was repeated."
        if content["ok"]
        else "The runs are not what they must be.",
        verdict_class="ok" if content["ok"] else "bad",
        findings="".join(f"<li>{html.escape(finding)}</li>" for finding in _findings(content)),
        faulty=faulty,
        losses=base64.b64encode(losses).decode(),
        coverage=base64.b64encode(coverage).decode(),
        goodput=base64.b64encode(goodput).decode(),
        recoveries=_recoveries_table(content["recoveries"]),
        audits=_audits_table(content["audits"]),
        timings=_html_table(
            ("spent on", "seconds"), [(what, f"{took:,.2f}") for what, took in content["timings"].items()]
        ),
    )


def _findings(content: Mapping[str, Any]) -> list[str]:
    compared, differing = content["steps_compared"], content["steps_differing"]
    replayed = sum(recovery["rows_replayed"] or 0 for recovery in content["recoveries"])
    losses = (
        "are bit for bit the same" if not differing else f"were compared; they differ, first at step {differing[0]}"
    )
    return [
        f"The losses of {compared:,} optimizer steps {losses}.",
        "Every planned row was consumed exactly once in every pass."
        if content["rows_consumed_once"]
        else "Not every planned row was consumed exactly once in every pass that was entered.",
        f"Recoveries: {len(content['recoveries'])}; rows of uncommitted steps that were trained again: {replayed:,}.",
        *(problem for audit in content["audits"].values() for problem in audit["problems"]),
    ]


def _recoveries_table(recoveries: Sequence[Mapping[str, Any]]) -> str:
    if not recoveries:
        return "<p>There were none.</p>"
    rows = [
        (
            recovery["cause"],
            recovery["noticed_by"],
            str(recovery["resumed_step"]),
            f"{recovery['rows_replayed']:,}",
            *("" if recovery[f"{phase}_s"] is None else f"{recovery[f'{phase}_s']:.2f}" for phase in PHASES),
            f"{Recovery(**recovery).recovered_s:.2f}",
            recovery["outcome"],
        )
        for recovery in recoveries
    ]
    phases = (f"{phase.replace('_', ' ')} (s)" for phase in PHASES)
    times = (*phases, "total without the operator's time (s)")
    return _html_table(("cause", "noticed by", "resumed at step", "rows replayed", *times, "outcome"), rows)


def _audits_table(audits: Mapping[str, Mapping[str, Any]]) -> str:
    names = [name for name in audits["reference"] if name != "problems"]
    rows = [(name.replace("_", " "), *(_format_value(audits[role][name]) for role in audits)) for name in names]
    return _html_table(("", *audits), rows)


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _html_table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    titles = "".join(f"<th>{html.escape(title)}</th>" for title in head)
    return f"<table><tr>{titles}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"
