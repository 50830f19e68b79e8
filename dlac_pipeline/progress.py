"""Signs of life of a rank: one small record in a file that is rewritten in place at every step, in microseconds; events."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

_RECORD = struct.Struct("<qqdqd")


class Phase(IntEnum):
    """What a rank is doing."""

    STARTING = 0
    LOADING = 1
    TRAINING = 2
    CHECKPOINT = 3
    DONE = 4


@dataclass(frozen=True, slots=True)
class Progress:
    """The last sign of life of one rank; `at` is in seconds since the epoch."""

    step: int
    phase: Phase
    at: float
    loss_step: int
    """Step whose loss is `loss`; 0 before the first."""
    loss: float


class ProgressWriter:
    """Writes a rank's record; without a launch folder it writes nothing."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._descriptor = None
        if folder is not None:
            self._descriptor = os.open(progress_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o644)

    def write(self, step: int, phase: Phase, *, loss_step: int = 0, loss: float = 0.0) -> None:
        """Replace the record."""
        if self._descriptor is not None:
            os.pwrite(self._descriptor, _RECORD.pack(step, phase, time.time(), loss_step, loss), 0)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventWriter:
    """Tells the supervisor what happened, once for all ranks; without a launch folder there is nobody to tell."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._path = None if folder is None or rank != 0 else folder / "events.jsonl"

    def write(self, event: Mapping[str, object]) -> None:
        """Append one event."""
        if self._path is not None:
            with self._path.open("a") as stream:
                stream.write(json.dumps({**event, "at": time.time()}) + "\n")


def progress_file(folder: Path, rank: int) -> Path:
    """Where a rank's record is."""
    return folder / f"progress-{rank:05d}"


def read_progress(folder: Path, rank: int) -> Progress | None:
    """The rank's last record, if it wrote one."""
    try:
        raw = progress_file(folder, rank).read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) < _RECORD.size:
        return None
    step, phase, at, loss_step, loss = _RECORD.unpack(raw[: _RECORD.size])
    return Progress(step, Phase(phase), at, loss_step, loss)
