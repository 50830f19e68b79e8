"""Liveness of a launch under another supervisor, and the refusal of a second launch while the first one is alive.

On this node the launch's lock decides, because the kernel releases it with its holder. Of another node only its writes can
be seen: the ledger, and its launch folder if that is shared. The refusal is a courtesy. Safety does not depend on it. A cluster's
job is never refused, because its scheduler may start it again, nor an orchestrator's launch because of its own other run.
"""

import logging
import math
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dlac_pipeline.lakehouse.errors import RunBusy
from dlac_pipeline.lakehouse.ledger import typed_rows
from dlac_pipeline.lakehouse.ledger.run_rows import claim_of, fence_of_rows, finished_of_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import NODES, LedgerRow
from dlac_pipeline.spec.bounds import LOST_AFTER_S
from dlac_pipeline.supervise.claims import claimed_by, last_reason, left_in_order
from dlac_pipeline.supervise.liveness.heartbeat import read_heartbeats
from dlac_pipeline.supervise.liveness.run_lock import lock_path

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec

_log = logging.getLogger(__name__)
POLL_S = 1.0
STEPS_SEEN_S = 15.0
"""Seconds to watch for another heartbeat if the steps of the launch's ranks can be seen, before its own clock is believed."""
_ITS_OWN = (
    *(typed_rows.ClaimRow, typed_rows.CheckpointRow),
    *(typed_rows.QuarantinedCheckpointRow, typed_rows.QuarantinedRowsRow),
)
"""Kinds of rows that only the named attempt appends. Rows of operators and of upkeep name the current attempt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLiveness:
    """Known facts about the launch of an attempt."""

    host: str
    """The node on which it was launched, or empty if unknown."""
    local: str
    """Local folder of its checkpoints on that node, with its lock. Empty if it launched nothing, or if unknown."""
    here: bool
    """True if it was launched on this node."""
    lock_held: bool
    """On this node only: True if a living process holds the run's lock."""
    silent_s: float
    """Seconds since its last heartbeat by its node's clock: a step of a rank, or a row that it wrote to the ledger."""
    newest: tuple[float, ...] = ()
    """Moments of its last heartbeats, by its node's clock. A changed value is a new heartbeat, even if the clocks differ."""
    rows_every_s: float | None = None
    """Longest time between two rows that it wrote, by its node's clock, or None with fewer than two rows."""
    shows_steps: bool = False
    """True if the steps of its ranks can be seen from this node."""

    def alive(self, *, lost_after_s: float) -> bool:
        """Return True if the launch counts as alive. On another node it counts as lost after `lost_after_s` of silence."""
        return self.lock_held if self.here else self.silent_s < lost_after_s


def liveness_of(rows: list[LedgerRow], attempt: int) -> LaunchLiveness:
    """Return the liveness of the launch that claimed `attempt`, from the run's rows. Empty facts if it has no claim."""
    claim = claim_of(rows, attempt)
    if not claim.attempt:
        return LaunchLiveness(host="", local="", here=False, lock_held=False, silent_s=float("inf"))
    written = [row.committed_at.timestamp() for row in rows if row.attempt == attempt and isinstance(row, _ITS_OWN)]
    steps = [progress.at for progress in read_heartbeats(Path(claim.launch_folder))] if claim.launch_folder else []
    here, local = claim.host == socket.gethostname(), claim.local
    return LaunchLiveness(
        host=claim.host,
        local=local,
        here=here,
        # rewinds and forks launch nothing
        lock_held=here and bool(local) and is_lock_held(lock_path(local, claim.run)),
        silent_s=time.time() - max([*written, *steps]),
        newest=(max(written), *steps),
        rows_every_s=max((after - before for before, after in pairwise(sorted(written))), default=None),
        shows_steps=bool(steps),
    )


def is_lock_held(lock: Path) -> bool:
    """Return True if a living process of this node holds a run's lock. The lock is inspected, never taken."""
    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        holder = psutil.Process(int(lock.read_text()))
        if holder.status() == psutil.STATUS_ZOMBIE:
            return False
        try:
            return any(Path(file.path) == lock.resolve() for file in holder.open_files())
        except psutil.AccessDenied:
            return True  # a process of another user, which cannot be inspected, is not fenced off
    return False


def refuse_if_alive_elsewhere(
    rows_now: Callable[[], list[LedgerRow]], spec: "JobSpec", *, launched_by: str, wait_s: float, stop: threading.Event
) -> None:
    """Wait up to `wait_s` for a launch elsewhere to exit or be lost. Raise `RunBusy` if it is still alive, or `stop` is set."""
    deadline = time.monotonic() + wait_s
    detector = _LaunchFailureDetector()
    while True:
        rows = rows_now()
        launch = liveness_of(rows, fence_of_rows(rows).attempt)
        if not _may_train_elsewhere(rows, spec, launch, launched_by) or detector.is_lost(launch):
            return
        waits = time.monotonic() < deadline or detector.may_be_lost(launch)
        if not waits or stop.wait(min(POLL_S, LOST_AFTER_S / 4)):
            raise RunBusy(_message(spec.run, fence_of_rows(rows).attempt, launch))


class _LaunchFailureDetector:
    """Failure detector of a launch elsewhere. Clocks of two nodes may differ by hours, so this node's clock counts as well."""

    def __init__(self) -> None:
        self._newest: tuple[float, ...] | None = None
        self._since = 0.0
        self._seen_alive = False

    def is_lost(self, launch: LaunchLiveness) -> bool:
        """Return True if the launch is silent for too long. For a launch on this node its lock decides."""
        if launch.here:
            return not launch.lock_held
        if math.isinf(launch.silent_s):
            return True  # the attempt launched nothing
        if launch.newest != self._newest:
            self._seen_alive = self._newest is not None
            self._newest, self._since = launch.newest, time.monotonic()
            if self.may_be_lost(launch):
                _log.warning(
                    f"attempt on node {launch.host!r} sent its last heartbeat {launch.silent_s:.0f} s ago by its clock: watching "
                    f"for {_watch_s(launch):.0f} s whether another follows"
                )
        watched_s = time.monotonic() - self._since
        return watched_s >= (_watch_s(launch) if self.may_be_lost(launch) else LOST_AFTER_S)

    def may_be_lost(self, launch: LaunchLiveness) -> bool:
        """Return True if the launch's own clock shows that it is lost, and no heartbeat came since the watch began."""
        return not (launch.here or self._seen_alive) and launch.silent_s >= LOST_AFTER_S


def _watch_s(launch: LaunchLiveness) -> float:
    """Return the seconds to watch for another heartbeat of a launch that is lost by its node's clock."""
    rows_every_s = 0.0 if launch.shows_steps else launch.rows_every_s
    return LOST_AFTER_S if rows_every_s is None else min(LOST_AFTER_S, max(STEPS_SEEN_S, 2 * rows_every_s))


def _may_train_elsewhere(rows: list[LedgerRow], spec: "JobSpec", launch: LaunchLiveness, launched_by: str) -> bool:
    """Return True if the current attempt may train elsewhere, so that only its heartbeats can decide."""
    attempt = fence_of_rows(rows).attempt
    if not attempt or finished_of_rows(rows) or not claim_of(rows, attempt).trains:
        return False
    # with NODES the run resumes on more nodes
    if left_in_order(rows, attempt) and last_reason(rows, attempt) != NODES:
        return False
    if (launch.host, launch.local) == (socket.gethostname(), spec.checkpoint.local):
        return False  # the lock is the better evidence
    one_job = spec.launch.on != "here" or bool(launched_by and claimed_by(rows, attempt))
    same_place = bool(spec.launch.rendezvous) and claim_of(rows, attempt).rendezvous == spec.launch.rendezvous
    return not (one_job or same_place)


def _message(run: str, attempt: int, launch: LaunchLiveness) -> str:
    found, wait = f"on this node, with the local folder {launch.local!r}", "wait for it"
    if not launch.here:
        silent_s = max(0.0, launch.silent_s)
        left_s = math.ceil(max(0.0, LOST_AFTER_S - silent_s))
        found = f"on node {launch.host!r}, whose last heartbeat was {silent_s:.0f} s ago"
        wait = f"wait {left_s} s, for it counts as lost if no other follows"
    return (
        f"expected no other launch of run {run!r}, found attempt {attempt} {found}: {wait}, stop it, or take the run over with "
        "--takeover, which fences it off"
    )
