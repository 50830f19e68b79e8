"""Liveness of a launch under another supervisor, from the claims of its run.

On this node the launch's lock decides, because the kernel releases it with its holder. Of another node only its writes can
be seen: the ledger, and its launch folder if that is shared.
"""

import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from dlac_pipeline.lakehouse.ledger.run_rows import claim_of
from dlac_pipeline.lakehouse.ledger.typed_rows import (
    CheckpointRow,
    ClaimRow,
    LedgerRow,
    QuarantinedCheckpointRow,
    QuarantinedRowsRow,
)
from dlac_pipeline.supervise.liveness.heartbeat import read_heartbeats
from dlac_pipeline.supervise.liveness.run_lock import lock_path

_ITS_OWN = (ClaimRow, CheckpointRow, QuarantinedCheckpointRow, QuarantinedRowsRow)
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
    """Seconds since its last heartbeat by its own clock: a step of a rank, or a row of its own in the ledger."""
    newest: tuple[float, ...] = ()
    """Moments of its last heartbeats, by its own clock. A changed value is a new heartbeat, even if the clocks differ."""
    rows_every_s: float | None = None
    """Longest time between two rows of its own, by its own clock, or None with fewer than two rows."""
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
    host, local = claim.host, claim.local
    here = host == socket.gethostname()
    return LaunchLiveness(
        host=host,
        local=local,
        here=here,
        lock_held=here
        and bool(local)
        and is_lock_held(lock_path(local, claim.run)),  # rewinds and forks launch nothing
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
