"""The checkpoints of a run as an operator sees them, and whether their files are what was committed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from catalog.connect import Lakehouse
from catalog.errors import CheckpointDamaged, NoSuchRun, StoreUnavailable
from catalog.ledger import Ledger, Row, checkpoint_rows, fence_of_rows
from dlac_pipeline.checkpoint.manifest import folder_of, read_manifest, verify_files


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedCheckpoint:
    """One checkpoint."""

    run: str
    checkpoint_id: str
    step: int
    attempt: int
    committed_at: datetime
    bytes: int | None
    """None for checkpoints of versions that did not write it down."""
    state: str
    """head; kept; left (not an ancestor of the head); retired; damaged (quarantined)."""
    folder: Path
    manifest_uri: str
    manifest_digest: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What re-reading a checkpoint found; no problem: every digest holds."""

    checkpoint: ListedCheckpoint
    problem: str | None


def list_checkpoints(lakehouse: Lakehouse, run: str) -> list[ListedCheckpoint]:
    """All checkpoints of a run, oldest first.

    Raises:
        NoSuchRun: the ledger has no row of it.
    """
    rows = Ledger(lakehouse).head_rows(run)
    head = fence_of_rows(rows).head  # of these rows: the run may go on meanwhile
    states = {row["checkpoint_id"]: _OUT[row["kind"]] for row in rows if row["kind"] in _OUT}
    checkpoints = checkpoint_rows(rows)
    lineage, each = set(), head
    while each is not None:
        lineage.add(each)
        each = checkpoints[each]["parent"]
    return [
        _listed(row, states.get(name) or ("head" if name == head else "kept" if name in lineage else "left"))
        for name, row in checkpoints.items()
    ]


def verify_checkpoints(
    lakehouse: Lakehouse,
    run: str,
    step: int | None = None,
    *,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Iterator[Verdict]:
    """Re-read what can still be restored, the newest first; of one step only, if that is given.

    `progress` is told how many of how many checkpoints are done.

    Raises:
        NoSuchRun: the ledger has no row of the run, or no such checkpoint that is kept.
    """
    listed = [each for each in list_checkpoints(lakehouse, run) if each.state in ("head", "kept", "left")]
    chosen = [each for each in reversed(listed) if step in (None, each.step)]
    if not chosen:
        there = [each.step for each in listed]
        raise NoSuchRun(
            f"expected a checkpoint of run {run!r}{'' if step is None else f' at step {step}'}, found {there!r}"
        )
    for done, each in enumerate(chosen):
        progress(done, len(chosen))
        problem = _problem_of(each)
        if problem is None or not _retired_meanwhile(lakehouse, each):
            yield Verdict(each, problem)


def _retired_meanwhile(lakehouse: Lakehouse, checkpoint: ListedCheckpoint) -> bool:
    listed = list_checkpoints(lakehouse, checkpoint.run)
    return any(one.checkpoint_id == checkpoint.checkpoint_id and one.state == "retired" for one in listed)


_OUT = {"retire": "retired", "quarantine": "damaged"}


def _listed(row: Row, state: str) -> ListedCheckpoint:
    return ListedCheckpoint(
        run=row["run"],
        checkpoint_id=row["checkpoint_id"],
        step=row["step"],
        attempt=row["attempt"],
        committed_at=row["committed_at"],
        bytes=json.loads(row["detail"])["bytes"] if row["detail"] else None,
        state=state,
        folder=folder_of(row["manifest_uri"]),
        manifest_uri=row["manifest_uri"],
        manifest_digest=row["manifest_digest"],
    )


def _problem_of(checkpoint: ListedCheckpoint) -> str | None:
    try:
        manifest = read_manifest(checkpoint.manifest_uri, checkpoint.manifest_digest)
        verify_files(manifest, checkpoint.folder)
    except (CheckpointDamaged, StoreUnavailable) as err:
        return str(err)
    return None
