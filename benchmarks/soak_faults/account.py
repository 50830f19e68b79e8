"""The final account: every run is exact and equal to an undisturbed one, and no failed part has left anything."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
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
from dlac_pipeline.extensions.upkeep.orphans import remove_orphans
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, claim_of, trained_by
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, ClaimRow, RetireRow
from dlac_pipeline.supervise.liveness.launch_liveness import is_lock_held
from dlac_pipeline.supervise.liveness.run_lock import lock_path

_RECORDED_SQL = Path(__file__).parents[2] / "tests" / "recorded.sql"
"""SQL from advances to row ids, without the code that made the order."""
_ROUNDING = 1e-5
"""Share of a loss by which it differs between numbers of replica groups, at most."""
_GONE_WITHIN_S = 180.0
"""Seconds after which a code server ends if its daemon was killed (Dagster's timeout is 45 s)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunAccount:
    """The results of one run."""

    run: str
    mode: str
    steps: int
    attempts: int
    checkpoints: int
    recoveries: int
    finished: bool
    audit_exact: bool
    journal_agrees: bool
    """Whether the row ids in the tensors, by the training function's journal, are those of the ledger."""
    losses_identical: bool
    """Whether losses are those of the undisturbed run: bit for bit, or with replica groups up to the rounding of a sum."""
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        """Whether all checks hold."""
        return self.finished and self.audit_exact and self.journal_agrees and self.losses_identical

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {**asdict(self), "problems": list(self.problems)}


def runs_of(lab: Lab, references: Mapping[str, Sequence[float]]) -> list[RunAccount]:
    """Return the account of every run, after an upkeep of the tables. `references` are losses of undisturbed runs, by mode."""
    run_upkeep(lab.lakehouse)
    return [_account(lab, trainee, references[trainee.mode]) for trainee in lab.trainees]


def left_of(lab: Lab) -> dict[str, list[str]]:
    """Return left-over objects by kind. Dagster must have ended, and upkeep must have run."""
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
    """Count the launch folders, which keep the logs of a launch, and those of launches that never claimed the run."""
    folders, named = set(), set()
    for trainee in lab.trainees:
        claims = trainee.rows(ClaimRow)
        named |= {claim_of(claims, row.attempt).launch_folder for row in claims}
        folders |= {str(folder) for folder in trainee.folder.glob("launch-*/")}
    return {"all": len(folders), "unclaimed": len(folders - named)}


def wait_for_dagster(lab: Lab) -> list[str]:
    """Return the Dagster runs that have not ended, after they had time for it."""

    def waited_for() -> list[str]:
        with lab.dagster.instance() as instance:
            return [f"{run.run_id}: {run.status.value}" for run in instance.get_runs() if not run.is_finished]

    _wait(lambda: not waited_for())
    return waited_for()


def trainers_of(lab: Lab) -> list[str]:
    """Return processes that train although all runs are finished. Dagster must still run, as its end would end them."""

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
    losses = [loss for row in lineage for loss in row.losses]
    return RunAccount(
        run=trainee.run,
        mode=trainee.mode,
        steps=audited.step,
        attempts=audited.attempts,
        checkpoints=audited.checkpoints,
        recoveries=len(recoveries_of(lab.lakehouse, trainee.run)),
        finished=audited.finished,
        audit_exact=audited.exact,
        journal_agrees=journal(lineage, trainee.rows(ClaimRow), trainee.entries())
        == _ledger_rows(lab.lakehouse, trainee, lineage),
        losses_identical=_are_equal(losses, reference, within=_ROUNDING if trainee.has_replicas else 0.0),
        problems=audited.problems,
    )


def _are_equal(losses: Sequence[float], expected: Sequence[float], *, within: float) -> bool:
    pairs = zip(losses, expected, strict=False)
    return len(losses) == len(expected) and all(abs(one - other) <= within * abs(other) for one, other in pairs)


def journal(
    lineage: Sequence[CheckpointRow], claims: Sequence[ClaimRow], entries: Sequence[dict[str, Any]]
) -> dict[int, list[int]]:
    """Return sorted row ids by step, as the ranks of the attempt that trained it wrote them.

    Replica groups may try a step again. The last try that a group committed counts, with the shares of all its groups.
    """
    tries: dict[tuple[int, int], dict[int, dict[int, list[int]]]] = {}
    written: dict[tuple[int, int], list[int]] = {}
    for entry in sorted(entries, key=lambda each: each["at"]):
        name, ranks = (entry["attempt"], entry["step"]), entry["ranks"]
        shares = tries.setdefault(name, {}).setdefault(ranks, {})
        if "rows" in entry:
            shares.pop(entry["rank"], None)  # a repeated share becomes the last one
            shares[entry["rank"]] = entry["rows"]
        if entry["done"]:
            written[name] = [row for share in list(shares.values())[-ranks:] for row in share]
    found, last = {}, 0
    for row in lineage:
        steps = range(last + 1, row.step + 1)
        trained = ((trained_by(claims, row.attempt, step), step) for step in steps)
        found[row.step] = sorted(one for each in trained for one in written.get(each, []))
        last = row.step
    return found


def _ledger_rows(lakehouse: Lakehouse, trainee: Trainee, lineage: Sequence[CheckpointRow]) -> dict[int, list[int]]:
    """Return the same from the ledger: from advances to slices, work units and rows of data files, in SQL."""
    ids = {row.checkpoint_id for row in lineage}
    advances = [row for row in trainee.rows(AdvanceRow) if row.checkpoint_id in ids]
    names = ("step", "plan_id", "cut_id", "key_group", "block", "position_start", "position_end")
    tables = {name: lakehouse.own(name).scan().to_arrow() for name in ("plans", "work_units", "slices")}
    tables["advances"] = pa.table({name: pa.array([getattr(row, name) for row in advances]) for name in names})
    parts = []
    for path in sorted(set(tables["work_units"]["file_path"].to_pylist())):
        part = pq.read_table(path.removeprefix("file://"), columns=["row_id"])
        parts.append(part.append_column("file_path", pa.array([path] * len(part))))
    tables["data"] = pa.concat_tables([one.append_column("at", pa.array(range(len(one)))) for one in parts])
    found: dict[int, list[int]] = {row.step: [] for row in lineage}
    with duckdb.connect() as connection:
        for name, table in tables.items():
            connection.register(name, table)
        for step, row_id in connection.execute(_RECORDED_SQL.read_text()).fetchall():
            found[step].append(row_id)
    return {step: sorted(rows) for step, rows in found.items()}


def _processes(home: Path) -> list[str]:
    """Return processes that were started for the lakehouse in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("DLAC_HOME") == str(home) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid}: {' '.join(process.cmdline())[:120]}")
    return found


def _stages(trainee: Trainee) -> list[str]:
    """Return folders of checkpoints without a ledger row, or with a row that they were removed."""
    rows = trainee.rows(CheckpointRow, RetireRow)
    retired = {row.checkpoint_id for row in rows if isinstance(row, RetireRow)}
    checkpoints = checkpoint_rows(rows)
    kept = {folder_name_of(row.manifest_uri) for each, row in checkpoints.items() if each not in retired}
    stages = {f"{stage.parent.name}/{stage.name}" for stage in trainee.folder.glob("attempt-*/*")}
    return [f"{trainee.run}/{name}" for name in sorted(stages - kept)]


def _temporary(store: Path) -> list[str]:
    """Return files under temporary names, which end when a file is whole."""
    return [str(each) for pattern in ("*.tmp-*", ".probe-*", "*.new") for each in store.rglob(pattern)]
