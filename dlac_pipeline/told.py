"""What a rank is told when it starts: its job spec, its lakehouse, and its resume point, whose cursors it checks.

Without a supervisor rank 0 claims the run, and tells the others.
"""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from catalog.connect import Lakehouse, connect
from catalog.errors import CatalogUnreachable, CursorMismatch, DlacError, SpecInvalid, TrainingFailed
from dlac_pipeline.checkpoint.failures import failing_together
from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.checkpoint.tree import RankTree
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.recover.coordinator import ResumePoint, new_nonce, take_over
from dlac_pipeline.recover.leg_choice import Wish
from dlac_pipeline.recover.patience import PATIENCE_S, waiting_for
from dlac_pipeline.recover.run_lock import run_lock
from dlac_pipeline.spec import JobSpec, home_folder, parse_spec, read_spec

_FIRST_LOOK_S, _LOOK_S = 0.02, 0.2
"""Seconds between two looks for the resume point: at first, and at most."""


def job_spec(folder: Path | None, spec: str | Path | None) -> JobSpec:
    """The job spec of this rank: the supervisor's, in its launch folder, or the one that the script names.

    Raises:
        SpecInvalid: neither is there, or so many ranks cannot train it.
    """
    if folder is not None:
        return parse_spec(json.loads((folder / "spec.json").read_text()), origin="the launch folder's spec")
    if spec is None:
        raise SpecInvalid(
            'expected a launch by `dlac train`, or training_run("job.toml") under another launcher; found neither'
        )
    read = read_spec(Path(spec)).resolved(home_folder())
    world_size = os.environ.get("WORLD_SIZE", "1")
    raw = {**read.model_dump(), "launch": {**read.launch.model_dump(), "world_size": world_size}}
    return parse_spec(raw, origin=f"the job spec under WORLD_SIZE={world_size}")


def open_lakehouse(spec: JobSpec, *, supervised: bool) -> Lakehouse:
    """The lakehouse. A supervised rank waits for a catalog that is away, for so does its supervisor's claim meanwhile.

    Raises:
        CatalogUnreachable: the catalog does not answer, or stayed away for too long.
    """
    within_s = PATIENCE_S if supervised else 0.0
    return waiting_for(CatalogUnreachable, within_s=within_s, stop=threading.Event())(connect, spec.lakehouse)


def await_resume_point(folder: Path) -> ResumePoint:
    """Wait for the supervisor, as long as it lives: it may have a large checkpoint to verify.

    Every rank looks, maybe on a network file system: the longer it has waited, the less often, and no look is later than a
    twentieth of the wait.
    """
    path, pause_s = folder / "resume.json", _FIRST_LOOK_S
    while not path.exists():
        time.sleep(pause_s)
        pause_s = min(_LOOK_S, pause_s * 1.05)
    return ResumePoint.from_json(path.read_text())


def claimed(
    lakehouse: Lakehouse, spec: JobSpec, tree: RankTree, tiers: Tiers | None, *, takeover: bool, held: ExitStack
) -> ResumePoint:
    """Without a supervisor rank 0 takes the run over; `held` keeps the run's lock; the first of a machine proves its `tiers`.

    Raises:
        DlacError: on rank 0, why it could not; on the others, that it could not.
    """
    with failing_together(tree, doing="looking at the checkpoint store"):
        if tiers is not None:
            tiers.check_writable()
    said = None
    if tree.rank == 0:
        try:
            held.enter_context(run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=takeover))
            said = take_over(lakehouse, spec, nonce=new_nonce(), wish=Wish(repin=True)).to_json()
        except DlacError as err:
            tree.broadcast(json.dumps({"error": str(err)}).encode())
            raise
    answer = tree.broadcast(None if said is None else said.encode()).decode()
    if "error" in json.loads(answer):
        raise TrainingFailed(f"rank 0 could not take over the run: {json.loads(answer)['error']}")
    return ResumePoint.from_json(answer)


def check_restored(order: LegOrder, step: int, found: ReaderState) -> None:
    """Check that restored cursors are where the order says; of streamed sources only the checkpoint's digest vouches for them.

    Raises:
        CursorMismatch: one is not.
    """
    if not order.counted:
        return
    for source, (expected, cursors) in enumerate(zip(order.reader_state(step), found, strict=True)):
        for group, (cursor, restored) in enumerate(zip(expected, cursors, strict=True)):
            if cursor != restored:
                raise CursorMismatch(
                    f"expected the cursor of key group {group} in source {source} at {cursor} after step {step}, the "
                    f"checkpoint holds {restored}: the plan or the order changed since it was taken"
                )
