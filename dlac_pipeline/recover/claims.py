"""What the claims of a run say: who launched which attempt, where and with what, and which of them a launch may replace."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from catalog.connect import Lakehouse
from catalog.errors import NoSuchRun
from catalog.ledger import Ledger
from catalog.run_rows import Row, trains_nothing
from dlac_pipeline.spec import JobSpec, home_folder, parse_spec


def launch_folder_of(rows: Sequence[Row], attempt: int) -> str:
    """The launch folder that an attempt's claim names; empty if it has none."""
    return _said(rows, attempt, "launch_folder")


def spec_of_attempt(rows: Sequence[Row], run: str, attempt: int) -> JobSpec:
    """The job spec with which an attempt was launched, from its launch folder.

    Raises:
        NoSuchRun: it is not on this machine.
    """
    folder = launch_folder_of(rows, attempt)
    path = Path(folder) / "spec.json"
    if not folder or not os.access(path, os.R_OK):
        raise NoSuchRun(
            f"expected the job spec of run {run!r} at {str(path)!r}, found none that may be read: name it with --spec"
        )
    return parse_spec(json.loads(path.read_text()), origin=repr(str(path))).resolved(home_folder())


def last_spec(lakehouse: Lakehouse, run: str) -> JobSpec:
    """The spec with which a run was launched last, from its launch folder; rewinds launch nothing."""
    rows = Ledger(lakehouse).head_rows(run)
    launches = [row["attempt"] for row in rows if row["kind"] == "claim" and not trains_nothing(row)]
    return spec_of_attempt(rows, run, launches[-1] if launches else 0)


def launcher_of(rows: Sequence[Row], attempt: int) -> str:
    """The orchestrator's run that launched an attempt, or the last before it that trains; empty if it was started by hand."""
    launches = [row["attempt"] for row in rows if row["kind"] == "claim" and not trains_nothing(row)]
    return _said(rows, max((each for each in launches if each <= attempt), default=0), "launched_by")


def claimed_by(rows: Sequence[Row], attempt: int) -> str:
    """The orchestrator's run that launched an attempt; empty if it was started by hand, or trains nothing."""
    return "" if idle(rows, attempt) else _said(rows, attempt, "launched_by")


def rendezvous_of(rows: Sequence[Row], attempt: int) -> str:
    """Where the machines of an attempt met; empty: it had one."""
    return _said(rows, attempt, "rendezvous")


def idle(rows: Sequence[Row], attempt: int) -> bool:
    """Whether an attempt was there to adopt, to rewind or to fork, and trained nothing."""
    return any(trains_nothing(row) for row in rows if row["kind"] == "claim" and row["attempt"] == attempt)


def to_replace(
    rows: Sequence[Row], wanted: int, *, rendezvous: str = "", recovers: str = "", launched_by: str = ""
) -> int:
    """The attempt that a launch replaces, told to replace `wanted`: that one, or the current one where it is its to replace.

    It is if another machine of this `rendezvous` claimed it, and told nobody perhaps; if the orchestrator's dead run that is
    recovered claimed it behind `wanted`, late; and if the orchestrator's own run did, whose job was started again.
    """
    current = max((int(row["attempt"]) for row in rows if row["kind"] == "claim"), default=0)
    same_place = bool(rendezvous) and rendezvous_of(rows, current) == rendezvous
    late = bool(recovers) and current > wanted and claimed_by(rows, current) == recovers
    again = bool(launched_by) and launcher_of(rows, current) == launched_by
    return current if same_place or late or again else wanted


def attempts_without_progress(rows: Sequence[Row]) -> int:
    """Claims since the last committed checkpoint or the last rewind, or since the beginning; of attempts that train."""
    last = max((int(row["seq"]) for row in rows if row["kind"] in ("checkpoint", "rewind")), default=0)
    return sum(1 for row in rows if row["kind"] == "claim" and int(row["seq"]) > last and not trains_nothing(row))


def _said(rows: Sequence[Row], attempt: int, name: str) -> str:
    claims = [row for row in rows if row["kind"] == "claim" and row["attempt"] == attempt]
    return str(json.loads(claims[-1]["detail"]).get(name, "")) if claims else ""
