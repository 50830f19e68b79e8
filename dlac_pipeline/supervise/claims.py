"""Facts from the claims of a run: the launcher, place and spec of each attempt, and the attempt that a launch may replace."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dlac_pipeline.lakehouse.config import home_folder, sqlite_file
from dlac_pipeline.lakehouse.errors import NoSuchJobSpec, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.relocation import Relocation, raw_path
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import claim_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow, RewindRow

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec

_ON_THE_WAY = ("steps", "seconds", "auto")
"""Reasons for checkpoints after which training continues. Other reasons are the end of the run and a request to stop."""


def launch_folders_of(rows: Sequence[LedgerRow], attempt: int) -> list[Path]:
    """Return the launch folders of an attempt on this node: its claim names one, and more may have its resume point."""
    named = claim_of(rows, attempt).launch_folder
    if not named:
        return []
    led = [path.parent for path in sorted(Path(named).parent.glob("launch-*/resume.json")) if _resumes(path, attempt)]
    return [each for each in dict.fromkeys((Path(named), *led)) if each.is_dir()]


def _resumes(path: Path, attempt: int) -> bool:
    try:
        return bool(json.loads(path.read_bytes())["attempt"] == attempt)
    except (OSError, ValueError, KeyError, TypeError):  # the file is being written, or was removed
        return False


def trained_attempts(rows: Sequence[LedgerRow]) -> list[int]:
    """Return the attempts that were launched to train, oldest first."""
    return [row.attempt for row in rows if isinstance(row, ClaimRow) and row.trains]


def spec_of_attempt(lakehouse: Lakehouse, rows: Sequence[LedgerRow], run: str, attempt: int) -> "JobSpec":
    """Return the job spec in an attempt's launch folder, with the places of `lakehouse`. Raise `NoSuchJobSpec` without one."""
    folder = claim_of(rows, attempt).launch_folder
    if not folder:
        raise NoSuchJobSpec(
            f"expected a job spec that DLAC launched run {run!r} with, found none: name one with --spec FILE"
        )
    from dlac_pipeline.spec.job_spec import parse_recorded  # it imports much that `dlac status` does not need

    path = Path(folder) / "spec.json"
    if not os.access(path, os.R_OK):
        raise NoSuchJobSpec(
            f"expected the job spec of run {run!r} at {str(path)!r}, found none that may be read: name it with --spec FILE"
        )
    try:
        spec = parse_recorded(json.loads(path.read_text()), origin=repr(str(path))).resolved(home_folder())
        if spec.run != run:
            raise SpecInvalid(f"that of run {spec.run!r}")
    except (ValueError, RecursionError, SpecInvalid) as err:  # the file is incomplete, or damaged
        raise NoSuchJobSpec(
            f"expected the job spec of run {run!r} at {str(path)!r}, found none ({err}): name it with --spec FILE"
        ) from err
    relocation = _relocation_of(lakehouse, spec)
    here, store = relocation.here, spec.checkpoint.store
    places = {"store": here(store) if store.startswith("/") else relocation.uri_here(store)}
    checkpoint = spec.checkpoint.model_copy(update={**places, "local": here(spec.checkpoint.local)})
    launch = spec.launch.model_copy(update={"script": here(spec.launch.script)})
    return spec.model_copy(update={"lakehouse": lakehouse.named, "checkpoint": checkpoint, "launch": launch})


def _relocation_of(lakehouse: Lakehouse, spec: "JobSpec") -> Relocation:
    """Return the relocation of a spec's places. Its warehouse and its catalog may both have moved since it was written."""
    files = sqlite_file(spec.lakehouse.uri), sqlite_file(lakehouse.config.uri)
    warehouses = raw_path(spec.lakehouse.warehouse), raw_path(lakehouse.config.warehouse)
    if None in files or None in warehouses:
        return lakehouse.relocation
    home, home_now = (str(file.parent) for file in files if file is not None)
    warehouse, warehouse_now = (folder for folder in warehouses if folder is not None)
    catalog_alone = home != home_now and warehouse == warehouse_now and warehouse.startswith(f"{home}/")
    moves = [(warehouse, warehouse_now)] if catalog_alone else [(warehouse, warehouse_now), (home, home_now)]
    moves.sort(key=lambda move: len(move[0]), reverse=True)
    return Relocation(moves=(*moves, *lakehouse.relocation.moves))


def last_spec(lakehouse: Lakehouse, run: str) -> "JobSpec":
    """Return the spec of the run's last launch, from its launch folder. Rewinds launch nothing."""
    rows = Ledger(lakehouse).head_rows(run)
    return spec_of_attempt(lakehouse, rows, run, max(trained_attempts(rows), default=0))


def launcher_of(rows: Sequence[LedgerRow], attempt: int) -> str:
    """Return the orchestrator's run that launched the last training attempt up to `attempt`. Empty if started by hand."""
    last = max((each for each in trained_attempts(rows) if each <= attempt), default=0)
    return claim_of(rows, last).launched_by


def claimed_by(rows: Sequence[LedgerRow], attempt: int) -> str:
    """Return the orchestrator's run that launched an attempt. Empty if it was started by hand or trains nothing."""
    claim = claim_of(rows, attempt)
    return claim.launched_by if claim.trains else ""


def to_replace(
    rows: Sequence[LedgerRow], wanted: int, *, rendezvous: str = "", recovers: str = "", launched_by: str = ""
) -> int:
    """Return the attempt that a launch replaces if it was asked to replace `wanted`: that one, or the current one.

    The current one is replaced in three cases:

    - Another node of this `rendezvous` claimed it, and its message may be lost.
    - The orchestrator's dead run that is recovered claimed it late, after `wanted`.
    - The orchestrator's own run claimed it, and its job was started again.
    """
    current = max((row.attempt for row in rows if isinstance(row, ClaimRow)), default=0)
    same_place = bool(rendezvous) and claim_of(rows, current).rendezvous == rendezvous
    late = bool(recovers) and current > wanted and claimed_by(rows, current) == recovers
    again = bool(launched_by) and launcher_of(rows, current) == launched_by
    return current if same_place or late or again else wanted


def attempts_without_progress(rows: Sequence[LedgerRow]) -> int:
    """Count the claims of attempts that train since the last progress, or the beginning.

    Progress is a committed checkpoint, a rewind, and a resumption from a memory state that is newer than the one before.
    """
    last = max((row.seq for row in rows if isinstance(row, CheckpointRow | RewindRow)), default=0)
    count = reached = 0
    for row in rows:
        if isinstance(row, ClaimRow) and row.seq > last and row.trains:
            count = 1 if row.memory_step > reached else count + 1
            reached = max(reached, row.memory_step)
    return count


def left_in_order(rows: list[LedgerRow], attempt: int) -> bool:
    """Return True if an attempt took its last checkpoint in order to exit, or because no rows were left."""
    return last_reason(rows, attempt) not in _ON_THE_WAY


def last_reason(rows: list[LedgerRow], attempt: int) -> str:
    """Return why an attempt took its last checkpoint, or `steps` if it took none or recorded no reason."""
    taken = [row for row in rows if isinstance(row, CheckpointRow) and row.attempt == attempt]
    return (taken[-1].reason or "steps") if taken else "steps"
