"""Heartbeat of a rank: a small record in its launch folder, rewritten in place at every step in microseconds."""

import json
import os
import struct
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from pathlib import Path

from dlac_pipeline.elastic.ranks.launch_folder import progress_file, ranks_with_progress, reason_file
from dlac_pipeline.spec.mesh_spec import MeshSpec

_RECORD = struct.Struct("<qqdqdqqqqqqqqd")


class Phase(IntEnum):
    """Phase of a rank."""

    STARTING = 0
    LOADING = 1
    TRAINING = 2
    CHECKPOINT = 3
    DONE = 4
    WAITING = 5
    """In training, for the other process groups of the attempt."""
    IDLE = 6
    """In training, for rows that are appended. Everything is committed."""


@dataclass(kw_only=True, slots=True)
class Spent:
    """Work of one rank since its attempt began. Times are its own, without the waits in collectives."""

    in_hand: int = -1
    """Step whose batch the rank has and has not finished. 0: it asks for a batch. -1: neither, or unknown."""
    rows: int = 0
    """Rows that it worked on in finished steps."""
    reading_us: int = 0
    computing_us: int = 0
    """Time from a batch to its `mean`, the forward part of a step."""
    checkpoint_us: int = 0
    """Time to write the rank's part of checkpoints."""
    checkpoint_bytes: int = 0
    loading_us: int = 0
    convert_us: int = 0
    """Time until a checkpoint was converted to this number of ranks."""
    began: float = 0.0
    """Start of training in seconds since the epoch, or 0."""


_SPENT = tuple(Spent.__dataclass_fields__)
_SPENT_VALUES = attrgetter(*_SPENT)


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """The last heartbeat of one rank. `at` is in seconds since the epoch."""

    step: int
    phase: Phase
    at: float
    loss_step: int
    """Step whose loss is `loss`, or 0 before the first."""
    loss: float
    spent: Spent = field(default_factory=Spent)

    @property
    def is_loading(self) -> bool:
        """True while the rank loads the state that it resumes from."""
        return self.phase == Phase.LOADING and not self.spent.loading_us

    @property
    def doing(self) -> str:
        """The rank's phase as one word."""
        if self.phase != Phase.TRAINING or self.spent.in_hand < 0:
            return self.phase.name.lower()
        return "computing" if self.spent.in_hand else "reading"


class HeartbeatFile:
    """Writer of a rank's record. Without a launch folder it writes nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._descriptor = None
        if folder is not None:
            self._descriptor = os.open(progress_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o644)

    def write(
        self, step: int, phase: Phase, *, loss_step: int = 0, loss: float = 0.0, spent: Spent | None = None
    ) -> None:
        """Replace the record."""
        if self._descriptor is not None:
            self.write_raw(_RECORD.pack(step, phase, time.time(), loss_step, loss, *_SPENT_VALUES(spent or Spent())))

    def write_raw(self, record: bytes) -> None:
        """Replace the record in place, which needs no room on a full disk."""
        assert self._descriptor is not None, "it has a launch folder"
        os.pwrite(self._descriptor, record, 0)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def read_record(folder: Path, rank: int) -> bytes:
    """Return the rank's last record as it was written. Empty if it wrote none."""
    try:
        return progress_file(folder, rank).read_bytes()
    except FileNotFoundError:
        return b""


def write_record(folder: Path, rank: int, raw: bytes, *, later_s: float) -> None:
    """Write the record that a rank of another node reported. `later_s` converts its time to the clock of this node."""
    step, phase, at, *rest = _RECORD.unpack(raw)
    with closing(HeartbeatFile(folder, rank)) as file:
        file.write_raw(_RECORD.pack(step, phase, at + later_s, *rest))


def read_heartbeat(folder: Path, rank: int) -> RankHeartbeat | None:
    """Return the rank's last record, or None if it wrote none."""
    raw = read_record(folder, rank)
    if len(raw) < _RECORD.size:
        return None
    step, phase, at, loss_step, loss, *spent = _RECORD.unpack(raw[: _RECORD.size])
    return RankHeartbeat(step, Phase(phase), at, loss_step, loss, Spent(**dict(zip(_SPENT, spent, strict=True))))


def read_heartbeats(folder: Path) -> list[RankHeartbeat]:
    """Return the last record of each rank that wrote one, in rank order. The number of ranks need not be known."""
    return [found for rank in ranks_with_progress(folder) if (found := read_heartbeat(folder, rank)) is not None]


def rows_of_readers(heartbeats: Sequence[RankHeartbeat], *, world_size: int, mesh: MeshSpec) -> int:
    """Return the rows of all readers in finished steps, by the heartbeats of some ranks. Readers have the same number of rows.

    The first rank of a share counts its rows, and the others count none.
    """
    counted = [each.spent.rows for each in heartbeats if each.spent.rows or mesh.replica_ranks == 1]
    return sum(counted) * mesh.readers(world_size) // max(1, len(counted))


def may_have_died_loading(launch_folder: str) -> bool:
    """Return whether the last heartbeats of a dead attempt are of ranks that load its state, or are not on this node.

    An exception is no death: either the state was removed, or it does not fit a script that may be corrected.
    """
    folder = Path(launch_folder)
    is_known = bool(launch_folder) and folder.is_dir()
    return not is_known or (any(each.is_loading for each in read_heartbeats(folder)) and not _has_raised(folder))


def _has_raised(folder: Path) -> bool:
    """Return whether a rank recorded an exception that neither another rank's end nor a passing failure explains."""
    for rank in ranks_with_progress(folder):
        with suppress(OSError, ValueError):  # it has recorded none
            if json.loads(reason_file(folder, rank).read_bytes())["origin"] not in ("peer", "passing"):
                return True
    return False
