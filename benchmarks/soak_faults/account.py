"""The account at the end: every run is exact and like one that nothing disturbed, and nothing is left of what has failed."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.soak_faults.lab import Lab
from benchmarks.soak_faults.trainee import Trainee
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.store import folder_name_of
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.run_rows import Row, checkpoint_rows
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.maintenance.orphans import remove_orphans
from dlac_pipeline.lakehouse.maintenance.upkeep import run_upkeep
from dlac_pipeline.supervise.claims import launch_folder_of
from dlac_pipeline.supervise.liveness.launch_liveness import is_lock_held
from dlac_pipeline.supervise.liveness.run_lock import lock_path

_RECORDED_SQL = Path(__file__).parents[2] / "tests" / "recorded.sql"
"""From advances to row ids, without the code that made the order."""
_GONE_WITHIN_S = 180.0
"""A code server whose daemon was killed ends when it has heard nothing of it for so long as Dagster says (45 s)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAccount:
    """What became of one run."""

    run: str
    mode: str
    steps: int
    attempts: int
    checkpoints: int
    recoveries: int
    finished: bool
    audit_exact: bool
    journal_agrees: bool
    """Whether the rows in the tensors, by the training function's journal, are those that the ledger names."""
    losses_identical: bool
    """Whether they are, bit for bit, those of the run that nothing disturbed."""
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether everything holds."""
        return self.finished and self.audit_exact and self.journal_agrees and self.losses_identical

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        return {**asdict(self), "problems": list(self.problems)}


def runs_of(lab: Lab, reference: Sequence[float]) -> list[RunAccount]:
    """The account of every run, behind an upkeep of the tables."""
    run_upkeep(lab.lakehouse)
    return [_account(lab, trainee, reference) for trainee in lab.trainees]


def left_of(lab: Lab) -> dict[str, list[str]]:
    """What is left that should not be, by what it is; Dagster must have ended, and upkeep have been done."""
    _wait(lambda: not _processes(lab.home))
    return {
        "processes": _processes(lab.home),
        "locks": [one.run for one in lab.trainees if is_lock_held(lock_path(one.spec.checkpoint.local, one.run))],
        "stage folders": [folder for one in lab.trainees for folder in _stages(one)],
        "temporary files": _temporary(lab.store),
        "table files": [
            f"{gone.files} of {name}" for name in TABLES if (gone := remove_orphans(lab.lakehouse, name)).files
        ],
    }


def launches_of(lab: Lab) -> dict[str, int]:
    """Launch folders, which have the logs of a launch and stay: how many, and how many of launches that never claimed the run."""
    folders, named = set(), set()
    for trainee in lab.trainees:
        claims = trainee.rows("claim")
        named |= {launch_folder_of(claims, row["attempt"]) for row in claims}
        folders |= {str(folder) for folder in trainee.folder.glob("launch-*/")}
    return {"all": len(folders), "unclaimed": len(folders - named)}


def wait_for_dagster(lab: Lab) -> list[str]:
    """Dagster runs that are not over, once they had time to be."""

    def waited_for() -> list[str]:
        with lab.dagster.instance() as instance:
            return [f"{run.run_id}: {run.status.value}" for run in instance.get_runs() if not run.is_finished]

    _wait(lambda: not waited_for())
    return waited_for()


def trainers_of(lab: Lab) -> list[str]:
    """Processes that train although all runs are finished; asked while Dagster runs, whose end would be theirs."""

    def training() -> list[str]:
        return [one for one in _processes(lab.home) if re.search(r"dlac_pipeline|: dlac ", one)]

    _wait(lambda: not training())
    return training()


def _wait(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _GONE_WITHIN_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(1.0)


def _account(lab: Lab, trainee: Trainee, reference: Sequence[float]) -> RunAccount:
    audited = audit_run(lab.lakehouse, trainee.run)
    lineage = trainee.lineage()
    return RunAccount(
        run=trainee.run,
        mode=trainee.spec.checkpoint.mode,
        steps=audited.step,
        attempts=audited.attempts,
        checkpoints=audited.checkpoints,
        recoveries=len(recoveries_of(lab.lakehouse, trainee.run)),
        finished=audited.finished,
        audit_exact=audited.exact,
        journal_agrees=journal(lineage, trainee.entries()) == _recorded(lab.lakehouse, trainee, lineage),
        losses_identical=[loss for row in lineage for loss in row["losses"]] == list(reference),
        problems=audited.problems,
    )


def journal(lineage: Sequence[Row], entries: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Row ids by the step of the checkpoint that has them, sorted: what the ranks of each checkpoint's attempt wrote."""
    written: dict[tuple[int, int], list[int]] = {}
    for entry in entries:
        written.setdefault((entry["attempt"], entry["step"]), []).extend(entry["rows"])
    found, last = {}, 0
    for row in lineage:
        steps = range(last + 1, row["step"] + 1)
        found[row["step"]] = sorted(one for step in steps for one in written.get((row["attempt"], step), []))
        last = row["step"]
    return found


def _recorded(lakehouse: Lakehouse, trainee: Trainee, lineage: Sequence[Row]) -> dict[int, list[int]]:
    """The same by the ledger: advances to slices, to work units, to rows of the data files, in SQL."""
    ids = {row["checkpoint_id"] for row in lineage}
    advances = [row for row in trainee.rows("advance") if row["checkpoint_id"] in ids]
    names = ("step", "plan_id", "cut_id", "key_group", "block", "position_start", "position_end")
    tables = {name: lakehouse.own(name).scan().to_arrow() for name in ("plans", "work_units", "slices")}
    tables["advances"] = pa.table({name: pa.array([row[name] for row in advances]) for name in names})
    parts = []
    for path in sorted(set(tables["work_units"]["file_path"].to_pylist())):
        part = pq.read_table(path.removeprefix("file://"), columns=["row_id"])
        parts.append(part.append_column("file_path", pa.array([path] * len(part))))
    tables["data"] = pa.concat_tables([one.append_column("at", pa.array(range(len(one)))) for one in parts])
    found: dict[int, list[int]] = {row["step"]: [] for row in lineage}
    with duckdb.connect() as connection:
        for name, table in tables.items():
            connection.register(name, table)
        for step, row_id in connection.execute(_RECORDED_SQL.read_text()).fetchall():
            found[step].append(row_id)
    return {step: sorted(rows) for step, rows in found.items()}


def _processes(home: Path) -> list[str]:
    """Processes that were started for the lakehouse in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("DLAC_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.cmdline())[:120]}")
    return found


def _stages(trainee: Trainee) -> list[str]:
    """Folders of checkpoints that no row names, or a row says are gone."""
    rows = trainee.rows("checkpoint", "retire")
    retired = {row["checkpoint_id"] for row in rows if row["kind"] == "retire"}
    checkpoints = checkpoint_rows(rows)
    kept = {folder_name_of(row["manifest_uri"]) for each, row in checkpoints.items() if each not in retired}
    stages = {f"{stage.parent.name}/{stage.name}" for stage in trainee.folder.glob("attempt-*/*")}
    return [f"{trainee.run}/{name}" for name in sorted(stages - kept)]


def _temporary(store: Path) -> list[str]:
    """Files under names that are given up once a file is whole."""
    return [str(each) for pattern in ("*.tmp-*", ".probe-*", "*.new") for each in store.rglob(pattern)]
