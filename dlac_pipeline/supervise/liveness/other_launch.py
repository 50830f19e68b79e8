"""Signs of life of a launch that somebody else supervises: in, the run's claims; out, whether it can be taken for alive.

On this machine the launch's lock decides: the kernel releases it with its holder. Of another machine only what it writes can
be seen: the ledger, and its launch folder where that is shared.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

from dlac_pipeline.lakehouse.ledger.run_rows import Row
from dlac_pipeline.supervise.liveness.progress import read_all_progress
from dlac_pipeline.supervise.run_lock import lock_path

_ITS_OWN = ("claim", "checkpoint", "quarantine")
"""Kinds of rows that only the attempt appends that they name; operators' and upkeep's name the one that is current."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchLiveness:
    """What is known of the launch behind an attempt."""

    host: str
    """The machine on which it was launched; empty: nobody knows."""
    local: str
    """The local folder of its checkpoints there, in which its lock lies; empty: it launched nothing, or nobody knows."""
    here: bool
    """Whether it was launched on this machine."""
    held: bool
    """Here only: whether a living process holds the run's lock."""
    silent_s: float
    """Seconds since it was seen to do something: a step of a rank, or a row of its own in the ledger. Its clock says so."""
    newest: tuple[float, ...] = ()
    """The moments of its signs, by its own clock: another value is a new sign, whatever the clocks say."""
    rows_every_s: float | None = None
    """The longest time between two rows of its own, by its own clock; None: it has fewer than two."""
    shows_steps: bool = False
    """Whether the steps of its ranks can be seen from here."""

    def alive(self, *, lost_after_s: float) -> bool:
        """Whether it is to be taken for alive; elsewhere it counts as lost after `lost_after_s` of silence."""
        return self.held if self.here else self.silent_s < lost_after_s


def liveness_of(rows: list[Row], attempt: int) -> LaunchLiveness:
    """The signs of the launch that claimed `attempt`, from the run's rows; of none, if it has no claim."""
    mine = [row for row in rows if row["attempt"] == attempt]
    claims = [json.loads(row["detail"]) for row in mine if row["kind"] == "claim"]
    if not claims:
        return LaunchLiveness(host="", local="", here=False, held=False, silent_s=float("inf"))
    claim = claims[-1]
    said = [row["committed_at"].timestamp() for row in mine if row["kind"] in _ITS_OWN]
    steps = _steps_at(claim.get("launch_folder", ""))
    host, local = claim.get("host", ""), claim.get("local", "")
    here = host == socket.gethostname()
    return LaunchLiveness(
        host=host,
        local=local,
        here=here,
        held=here and bool(local) and is_held(lock_path(local, mine[0]["run"])),  # rewinds and forks launch nothing
        silent_s=time.time() - max([*said, *steps]),
        newest=(max(said), *steps),
        rows_every_s=max((after - before for before, after in pairwise(sorted(said))), default=None),
        shows_steps=bool(steps),
    )


def is_held(lock: Path) -> bool:
    """Whether a living process of this machine holds a run's lock. It is looked at, never taken: that would be a launch."""
    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        holder = psutil.Process(int(lock.read_text()))
        if holder.status() == psutil.STATUS_ZOMBIE:
            return False
        try:
            return any(Path(file.path) == lock.resolve() for file in holder.open_files())
        except psutil.AccessDenied:
            return True  # somebody else's process: who may not look does not fence it off
    return False


def _steps_at(folder: str) -> list[float]:
    """When the ranks of a launch gave signs of life, where its folder can be seen from here."""
    return [progress.at for progress in read_all_progress(Path(folder))] if folder else []
