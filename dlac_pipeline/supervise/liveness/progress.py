"""Signs of life of a rank: a small record, rewritten in place at every step in microseconds, and events."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from operator import attrgetter
from pathlib import Path
from typing import Any

from dlac_pipeline.elastic.ranks.launch_folder import in_hand_file, progress_file, ranks_with_progress

_ENDINGS = ("finished", "stopped", "caught_up", "left")
_FIRST = struct.Struct("<qqdqd")
"""Fields that every version writes. Later fields follow them."""
_RECORD = struct.Struct(_FIRST.format + "qqqqqqqqd")


class Phase(IntEnum):
    """Phase of a rank."""

    STARTING = 0
    LOADING = 1
    TRAINING = 2
    CHECKPOINT = 3
    DONE = 4


@dataclass(frozen=True, kw_only=True, slots=True)
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


_NOTHING = Spent()
_SPENT = tuple(Spent.__dataclass_fields__)
_SAID = attrgetter(*_SPENT)


@dataclass(frozen=True, slots=True)
class Progress:
    """The last sign of life of one rank. `at` is in seconds since the epoch."""

    step: int
    phase: Phase
    at: float
    loss_step: int
    """Step whose loss is `loss`, or 0 before the first."""
    loss: float
    spent: Spent = _NOTHING

    @property
    def doing(self) -> str:
        """The rank's phase as one word."""
        if self.phase != Phase.TRAINING or self.spent.in_hand < 0:
            return self.phase.name.lower()
        return "computing" if self.spent.in_hand else "reading"


class ProgressWriter:
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
            said = _SAID(spent or _NOTHING)
            os.pwrite(self._descriptor, _RECORD.pack(step, phase, time.time(), loss_step, loss, *said), 0)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


class EventWriter:
    """Writer of events for the supervisor. Only rank 0 writes them, and nothing is written without a launch folder."""

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._rank = rank
        self._path: Path | None = None
        self.open(folder)

    def open(self, folder: Path | None) -> None:
        """Write to this launch folder from now on."""
        self._path = None if folder is None or self._rank != 0 else folder / "events.jsonl"

    def write(self, event: Mapping[str, object]) -> None:
        """Append one event."""
        if self._path is not None:
            with self._path.open("a") as stream:
                stream.write(json.dumps({**event, "at": time.time()}) + "\n")


def read_total_steps(folder: Path) -> int | None:
    """Return the last step of the run, as the ranks recorded it when they began to train, or None if unknown."""
    return next((event["total_steps"] for event in reversed(_read_events(folder, ("training",)))), None)


def read_ending(folder: Path) -> str | None:
    """Return how the script of an attempt ended its run, as rank 0 recorded it, or None if it did not end in order.

    One of: finished, stopped, caught_up, left.
    """
    events = _read_events(folder, ("training", *_ENDINGS))
    ending = str(events[-1]["event"]) if events else "training"
    return ending if ending in _ENDINGS else None


def _read_events(folder: Path, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Return the events of these kinds that rank 0 wrote. Empty if the folder cannot be read."""
    try:
        lines = (folder / "events.jsonl").read_text().splitlines(keepends=True)
    except OSError:
        return []
    wanted = [f'"event": "{kind}"' for kind in kinds]
    return [json.loads(line) for line in lines if line.endswith("\n") and any(each in line for each in wanted)]


def read_in_hand(folder: Path, step: int) -> Iterator[list[int]]:
    """Yield the ranges that the ranks' batch of `step` moves: source, key group, pass, block, first position, end position.

    A rank that died while it wrote has recorded nothing.
    """
    for path in sorted(folder.glob(in_hand_file(folder, 0).name.replace("00000", "*"))):
        with suppress(ValueError):
            told, moved = json.loads(path.read_text(errors="replace").partition("\n")[0])
            yield from moved if told == step else []


def read_record(folder: Path, rank: int) -> bytes:
    """Return the rank's last record as it was written. Empty if it wrote none."""
    try:
        return progress_file(folder, rank).read_bytes()
    except FileNotFoundError:
        return b""


def write_record(folder: Path, rank: int, raw: bytes, *, later_s: float) -> None:
    """Write the record that a rank of another node reported. `later_s` converts its time to the clock of this node."""
    step, phase, at, *rest = _RECORD.unpack(raw)
    record = _RECORD.pack(step, phase, at + later_s, *rest)
    descriptor = os.open(progress_file(folder, rank), os.O_WRONLY | os.O_CREAT, 0o644)
    try:  # in place, which needs no room on a full disk
        os.pwrite(descriptor, record, 0)
    finally:
        os.close(descriptor)


def read_progress(folder: Path, rank: int) -> Progress | None:
    """Return the rank's last record, or None if it wrote none."""
    raw = read_record(folder, rank)
    if len(raw) < _FIRST.size:
        return None
    if len(raw) < _RECORD.size:  # a record of an older version
        step, phase, at, loss_step, loss = _FIRST.unpack(raw[: _FIRST.size])
        return Progress(step, Phase(phase), at, loss_step, loss)
    step, phase, at, loss_step, loss, *spent = _RECORD.unpack(raw[: _RECORD.size])
    return Progress(step, Phase(phase), at, loss_step, loss, Spent(**dict(zip(_SPENT, spent, strict=True))))


def read_all_progress(folder: Path) -> list[Progress]:
    """Return the last record of each rank that wrote one, in rank order. The number of ranks need not be known."""
    return [found for rank in ranks_with_progress(folder) if (found := read_progress(folder, rank)) is not None]
