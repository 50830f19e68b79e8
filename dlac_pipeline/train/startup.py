"""Startup of a rank: its job spec, its lakehouse, and its resume point, whose cursors it checks.

Without a supervisor rank 0 claims the run and notifies the other ranks. It then records how the recovery from a failure went.
"""

from __future__ import annotations

import json
import logging
import os
import random
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.failures import failing_together
from dlac_pipeline.checkpoint.files import make_below
from dlac_pipeline.checkpoint.store import Tiers, storing
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, CursorMismatch, DlacError, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import LedgerWatch
from dlac_pipeline.lakehouse.retrying import retrying
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.spec.job_spec import JobSpec, home_folder, parse_recorded, parse_spec, read_spec
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.supervise.choose_leg import ResumeOptions
from dlac_pipeline.supervise.claim import ResumePoint, claim_and_verify, new_nonce
from dlac_pipeline.supervise.failure import failure_of_attempt, planned_end
from dlac_pipeline.supervise.incident import Incident, RecoveryOutcome, write_given_up
from dlac_pipeline.supervise.liveness.heartbeat_writer import HeartbeatWriter, Phase
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.supervise.ranks.start_ranks import KEEP_LAUNCHES, forget_launches
from dlac_pipeline.supervise.retry_policy import RETRY_WITHIN_S

_log = logging.getLogger(__name__)
_FIRST_LOOK_S, _LOOK_S = 0.02, 0.2
"""Seconds between two looks for the resume point: at first, and at most."""
_LAUNCHED = "LOCAL_RANK"
"""A variable that torchrun and the `deepspeed` launcher set for each rank."""
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""A variable of torchrun: how many times it has started the ranks again."""


def job_spec(folder: Path | None, spec: str | Path | None) -> JobSpec:
    """Return the job spec of this rank: the supervisor's, in its launch folder, or the one that the script names.

    Raises:
        SpecInvalid: neither exists, or it does not allow this number of ranks.
    """
    if folder is not None:
        return parse_recorded(json.loads((folder / "spec.json").read_text()), origin="the launch folder's spec")
    if spec is None:
        raise SpecInvalid(
            'expected a launch by `dlac train`, or training_run("job.toml") under another launcher; found neither'
        )
    read = read_spec(Path(spec)).resolved(home_folder())
    world_size = os.environ.get("WORLD_SIZE", "1")
    raw = {**read.model_dump(), "launch": {**read.launch.model_dump(), "world_size": world_size}}
    return parse_spec(raw, origin=f"the job spec under WORLD_SIZE={world_size}")


def open_lakehouse(spec: JobSpec, *, supervised: bool) -> Lakehouse:
    """Return the lakehouse. A supervised rank waits for an unavailable catalog, as its supervisor's claim does.

    The supervisor has opened the catalog before, so an error during a failover is an outage.

    Raises:
        CatalogUnreachable: the catalog does not answer, or was unavailable for too long.
    """
    within_s = RETRY_WITHIN_S if supervised else 0.0
    return retrying(within_s, of=CatalogUnreachable)(connect, spec.lakehouse, answered=supervised)


def await_resume_point(folder: Path) -> ResumePoint:
    """Wait for the supervisor's resume point and return it. The supervisor may have a large checkpoint to verify.

    The wait has no limit, because no rank outlives its supervisor. Every rank polls, perhaps on a network file system. Its
    pauses grow to a twentieth of the wait, up to 0.2 seconds.
    """
    path, pause_s = folder / "resume.json", _FIRST_LOOK_S
    while not path.exists():
        time.sleep(pause_s)
        pause_s = min(_LOOK_S, pause_s * 1.05)
    return ResumePoint.from_json(path.read_text())


def claim_run(
    lakehouse: Lakehouse, spec: JobSpec, tree: RankTree, tiers: Tiers | None, *, takeover: bool, held: ExitStack
) -> ResumePoint:
    """Claim the run on rank 0, without a supervisor.

    `held` keeps the run's lock. The first rank of a node checks its `tiers`.

    From then on rank 0 watches the ledger. If an older backup replaces the catalog, it logs that, and the next commit fails.

    Raises:
        DlacError: on rank 0 the cause, on the other ranks that rank 0 failed.
    """
    with failing_together(tree, doing="looking at the checkpoint store"):
        if tiers is not None:
            tiers.check_writable()
    said = None
    if tree.rank == 0:
        try:
            held.enter_context(run_lock(spec.checkpoint.local, spec.run, wait_s=0.0, takeover=takeover))
            nonce = new_nonce()
            folder = str(own_folder(spec, nonce) or "")
            said = claim_and_verify(
                lakehouse, spec, nonce=nonce, wish=ResumeOptions(repin=True), launch_folder=folder
            ).to_json()
        except DlacError as err:
            tree.broadcast(json.dumps({"error": str(err)}).encode())
            raise
        held.callback(LedgerWatch(lakehouse).close)
    answer = tree.broadcast(None if said is None else said.encode()).decode()
    if "error" in json.loads(answer):
        raise TrainingFailed(f"rank 0 could not take over the run: {json.loads(answer)['error']}")
    return ResumePoint.from_json(answer)


def own_folder(spec: JobSpec, nonce: str) -> Path | None:
    """Return the launch folder of ranks that another launcher started, on their own node, or None without a launcher."""
    return Path(spec.checkpoint.local) / spec.run / f"launch-{nonce}" if _LAUNCHED in os.environ else None


def make_own_folder(spec: JobSpec, nonce: str) -> Path | None:
    """Make the launch folder of ranks that another launcher started: their heartbeats are written to it.

    Raises:
        StoreUnavailable: the folder cannot be made.
    """
    folder = own_folder(spec, nonce)
    if folder is not None:
        with storing(folder):
            make_below(folder.parent, folder)
        if os.environ[_LAUNCHED] == "0":
            forget_launches(folder.parent, keep=KEEP_LAUNCHES)
    return folder


class OwnRecoveries:
    """Recoveries that rank 0 records without a supervisor. Other ranks, and ranks under a supervisor, record none."""

    def __init__(self, lakehouse: Lakehouse, spec: JobSpec, events: EventWriter) -> None:
        self._lakehouse = lakehouse
        self._spec = spec
        self._events = events
        self._incident: Incident | None = None
        """The recovery in progress."""

    def begin(self, point: ResumePoint, *, claimed_at: float) -> None:
        """Begin to record the recovery of this attempt if one before it failed. An error of the record is only logged."""
        try:
            self._incident = _own_incident(self._lakehouse, self._spec, point, claimed_at=claimed_at)
        except DlacError as err:
            _log.warning("the recovery cannot be recorded: %s", err)

    def observe(self, signs: HeartbeatWriter, phase: Phase) -> None:
        """Record the recovery once the first step of the attempt is done."""
        if self._incident is not None and self._incident.observe([signs.now(phase)]):
            self._record(self._incident, "resumed")

    def fail(self) -> None:
        """Record that the recovery failed before the first step. Without a recovery in progress nothing is recorded."""
        if self._incident is not None:
            self._record(self._incident, "failed again")

    def give_up(self, err: DlacError, *, attempt: int, step: int) -> None:
        """Record that no attempt follows this one. An error of the record is ignored."""
        with suppress(DlacError):
            failure = planned_end(f"{type(err).__name__}: {err}", step=step)
            write_given_up(self._lakehouse, self._spec.run, attempt, replace(failure, noticed_by="rank 0"))

    def _record(self, incident: Incident, outcome: RecoveryOutcome) -> None:
        """Write the recovery to the ledger. An error is only logged. The script's random generator is left unchanged."""
        self._incident = None
        state = random.getstate()
        try:
            self._events.write(incident.report(self._lakehouse, outcome))
        except DlacError as err:
            _log.warning("the recovery could not be recorded: %s", err)
        finally:
            random.setstate(state)


def _own_incident(lakehouse: Lakehouse, spec: JobSpec, point: ResumePoint, *, claimed_at: float) -> Incident | None:
    """Return the incident from which rank 0 recovers without a supervisor, or None if no attempt had failed.

    torchrun detects a dead rank. Otherwise an operator starts the ranks again. `claimed_at` is the moment at which rank 0
    began to claim the run.
    """
    if not point.replaces or _LAUNCHED not in os.environ:
        return None
    failure = failure_of_attempt(
        Ledger(lakehouse).rows(spec.run, kinds=("claim", "checkpoint")),
        point.replaces,
        noticed_by="torchrun" if os.environ.get(_RESTARTS, "0") != "0" else OPERATOR,
        noticed_at=psutil.Process().create_time(),
        launched_at=claimed_at,
        stopped_at=claimed_at,
    )
    return None if failure is None else Incident(spec, point, failure)


def check_restored(order: LegOrder, step: int, found: ReaderState) -> None:
    """Check restored cursors against the order. For streamed sources only the checkpoint's digest proves them.

    Raises:
        CursorMismatch: a cursor differs.
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
