"""Part of a key group in each batch: its slots are shared out among the sources by the schedule, and filled from streams."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from dlac_pipeline.plan.mixture import Mixture, Present
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.line import BlockAdvance
from dlac_pipeline.read.packing import Stream
from dlac_pipeline.read.streams import Columns, RowSpan, RowStream

OpenStream = Callable[[int, int, Cursor], Stream]
"""(source, key group, cursor) -> stream."""


_FIRST_TRIED = 16
"""Batches for which the schedule of a mixture is made at first."""


@dataclass(slots=True)
class GroupBatch:
    """A key group's part of one batch, as far as the rank works on it."""

    pieces: list[tuple[Columns, Ints, Ints]] = field(default_factory=list)
    """Columns, rows of them, and the slots that these fill, counted from the rank's first slot of this key group."""
    samples: int = 0
    """Slots of the whole key group that are filled."""
    items: int = 0
    """Tokens without padding in the pieces. Without packing, the samples."""
    source_of: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """The source of each slot of the key group, -1 where it is empty."""
    advances: list[tuple[int, BlockAdvance]] = field(default_factory=list)
    """(source, its advances)."""
    present: Present = ()
    """The sources that remained before the batch."""
    outlasts: bool = False
    """True if a source ended inside the batch, and others fill it."""


@dataclass(frozen=True, slots=True)
class GroupRun:
    """A key group's part of several batches, all of it filled."""

    pieces: list[tuple[Columns, Ints | slice, Ints | int]]
    """Columns, rows of them, and their places: batch * width + slot, or the first of consecutive ones."""
    source_of: Ints
    """The source of each slot that the rank works on, int64 [batches, width]."""
    cursors: Ints
    """The key group's cursors after each batch, int64 [batches, sources, 4]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSlots:
    """Slots of a key group in each batch. The rank works on `low` .. `high`-1 of them: on all, unless ranks share the group."""

    group: int
    slots: int
    low: int
    high: int


class GroupReader:
    """Part of a key group in each batch, as far as the rank works on it."""

    def __init__(
        self,
        mixture: Mixture,
        active: Sequence[bool],
        part: GroupSlots,
        *,
        samples_before: int,
        cursors: Sequence[Cursor],
        open_stream: OpenStream,
    ) -> None:
        self._mixture = mixture
        self._group = part.group
        self._slots = part.slots
        self.low, self.high = part.low, part.high
        """The slots that the rank works on."""
        self.width = part.high - part.low
        self.has_last_slot = part.high == part.slots
        """True if this rank reports for the key group, if ranks share it."""
        self._wanted = (part.low, part.high)
        self._at = samples_before
        self._open_stream = open_stream
        self._cursors = list(cursors)
        self._active = tuple(active)
        self._only = self._active.index(True) if sum(self._active) == 1 else None
        """The source of all samples, if there is only one."""
        self._streams: dict[int, Stream] = {}
        """Streams of the sources that were drawn. A late source would take memory from the sources that are read before it."""
        while self._open(self._active):
            pass

    @property
    def cursors(self) -> list[Cursor]:
        """The key group's cursor in each source."""
        return [
            self._streams[source].cursor if source in self._streams else cursor
            for source, cursor in enumerate(self._cursors)
        ]

    @property
    def present(self) -> Present:
        """The sources from which a sample can still come."""
        ended = {source for source, stream in self._streams.items() if stream.exhausted}
        present = tuple(here and source not in ended for source, here in enumerate(self._active))
        return self.present if self._open(present) else present

    def _open(self, present: Present) -> bool:
        """Open the streams of sources that are drawn while these remain, or after their last blocks. True: one is new."""
        last = {
            source for source, stream in self._streams.items() if isinstance(stream, RowStream) and stream.in_last_block
        }
        soon = tuple(here and source not in last for source, here in enumerate(present))
        drawn = zip(self._mixture.drawn(present), self._mixture.drawn(soon), strict=True)
        new = [source for source, here in enumerate(drawn) if any(here) and source not in self._streams]
        self._streams |= {source: self._open_stream(source, self._group, self._cursors[source]) for source in new}
        return bool(new)

    def take(self, *, give: bool = True) -> GroupBatch:
        """Return the next batch's part. The cursors move over all slots. Without `give` no pieces are made."""
        self._wanted = (self.low, self.high) if give else (0, 0)
        before, remained = self.cursors, self.present
        batch = GroupBatch(source_of=np.full(self._slots, -1, dtype=np.int64), present=remained)
        if self._fill(batch, 0, self._slots, remained):
            # A source ended inside the batch: again, slot by slot, as the schedule is from there on another one.
            for source, stream in self._streams.items():
                stream.close()
                self._streams[source] = self._open_stream(source, self._group, before[source])
            batch = GroupBatch(source_of=np.full(self._slots, -1, dtype=np.int64), present=remained, outlasts=True)
            slot = 0
            while slot < self._slots and any(present := self.present):
                filled = batch.samples
                self._fill(batch, slot, slot + 1, present)
                # no sample if a source has ended: the slot is filled again without it
                slot += batch.samples - filled
        self._at += self._slots
        return batch

    def close(self) -> None:
        """Release the blocks of the streams."""
        for stream in self._streams.values():
            stream.close()

    def ready_batches(self, limit: int, value_bytes: int) -> int:
        """Return how many of the next `limit` batches, all full, the blocks being read fill. The first may lead out of one.

        Their values of several lengths take at most `value_bytes`, or there is one batch.
        """
        if self._only is not None:
            stream = self._row_stream(self._only)
            left = min(limit, stream.rows_left // self._slots)
            until = self._slots * np.arange(1, left + 1, dtype=np.int64)
            found = max(1, self._fitting({self._only: until}, value_bytes))
            ends_early = left <= found < limit and stream.take_ready()
            return self.ready_batches(limit, value_bytes) if ends_early else found
        ready = {source: stream.ready_rows for source, stream in self._streams.items()}
        limit, tried = min(limit, sum(ready.values()) // self._slots), 0
        found = 0
        while tried < limit and found == tried:  # a source with few rows ends a long schedule early
            tried = min(limit, max(_FIRST_TRIED, 4 * tried))
            schedule = self._schedule(tried)
            until_of = {source: (schedule == source).sum(axis=1).cumsum() for source in ready}
            found = min(int(until.searchsorted(ready[source], side="right")) for source, until in until_of.items())
        return self._fitting({source: until[:found] for source, until in until_of.items()}, value_bytes) if found else 0

    def _fitting(self, until_of: dict[int, Ints], value_bytes: int) -> int:
        """Return how many batches have values of so many bytes. `until_of`: rows of each source to the end of each batch."""
        batches = len(next(iter(until_of.values())))
        if not batches:
            return 0
        used = sum(self._row_stream(source).value_bytes(until, value_bytes) for source, until in until_of.items())
        return max(1, int(np.searchsorted(used, value_bytes, side="right")))

    def run(self, batches: int) -> GroupRun:
        """Return the part of the next batches, as many as are ready."""
        if self._only is not None:
            return self._run_of(self._only, batches)
        schedule = self._schedule(batches)
        cursors = np.empty((batches, len(self._cursors), 4), dtype=np.int64)
        cursors[:] = np.array(self.cursors)
        pieces: list[tuple[Columns, Ints | slice, Ints | int]] = []
        for source in self._streams:
            mine = schedule == source
            until = mine.sum(axis=1).cumsum()
            if not until[-1]:
                continue
            taken, cursors[:, source] = self._row_stream(source).run(until)
            pieces += self._with_places(taken, *np.nonzero(mine))
        self._at += schedule.size
        return GroupRun(pieces, schedule[:, self.low : self.high], cursors)

    def _run_of(self, source: int, batches: int) -> GroupRun:
        """Return the part of the next batches, which samples of this source alone fill."""
        taken, moved = self._row_stream(source).run(self._slots * np.arange(1, batches + 1, dtype=np.int64))
        cursors = np.empty((batches, len(self._cursors), 4), dtype=np.int64)
        cursors[:] = np.array(self._cursors)
        cursors[:, source] = moved
        pieces: list[tuple[Columns, Ints | slice, Ints | int]] = []
        if self.width == self._slots:
            first = 0
            for columns, rows in taken:
                pieces.append((columns, rows, first))
                first += rows.stop - rows.start
        else:
            pieces += self._with_places(taken, *np.divmod(np.arange(batches * self._slots), self._slots))
        self._at += batches * self._slots
        return GroupRun(pieces, np.full((batches, self.width), source, dtype=np.int64), cursors)

    def _with_places(
        self, taken: Sequence[RowSpan], batch: Ints, slot: Ints
    ) -> Iterator[tuple[Columns, Ints | slice, Ints]]:
        """Yield those of the rows in these slots of batches that the rank works on, and their places."""
        places, inside = batch * self.width + slot - self.low, (slot >= self.low) & (slot < self.high)
        first = 0
        for columns, rows in taken:
            mine = slice(first, first := first + rows.stop - rows.start)
            if self.width == self._slots:
                yield columns, rows, places[mine]
            else:
                yield columns, np.arange(rows.start, rows.stop)[inside[mine]], places[mine][inside[mine]]

    def begin_next(self) -> None:
        """Begin to prepare the block that the next batch leads into, if all samples come from one source."""
        stream = None if self._only is None else self._streams[self._only]
        if isinstance(stream, RowStream):
            stream.begin_next(self._slots)

    def _row_stream(self, source: int) -> RowStream:
        stream = self._streams[source]
        assert isinstance(stream, RowStream)
        return stream

    def _schedule(self, batches: int) -> Ints:
        """The source of each slot of the next batches, int64 [batches, slots]."""
        stop = self._at + batches * self._slots
        return self._mixture.sources(self._group, self._at, stop, self.present).reshape(batches, self._slots)

    def _fill(self, batch: GroupBatch, start: int, stop: int, present: Present) -> bool:
        """Fill slots start .. stop-1 while these sources remain. Return True if one of several ended before the last slot."""
        if not any(present):
            return False
        sources = self._mixture.sources(self._group, self._at + start, self._at + stop, present)
        broken = False
        for source in [index for index, here in enumerate(present) if here]:
            slots = np.flatnonzero(sources == source) + start
            if len(slots):
                count = self._take_from(batch, source, slots)
                ended = count < len(slots) or (self._streams[source].exhausted and slots[-1] < stop - 1)
                broken = broken or (ended and sum(present) > 1)
        return broken

    def _take_from(self, batch: GroupBatch, source: int, slots: Ints) -> int:
        low, high = (int(np.searchsorted(slots, bound)) for bound in self._wanted)
        given = self._streams[source].take(len(slots), low, high)
        batch.source_of[slots[: given.count]] = source
        batch.samples += given.count
        batch.items += given.items
        batch.advances += [(source, advance) for advance in given.advances]
        at = low
        for columns, rows in given.pieces:
            batch.pieces.append((columns, rows, slots[at : at + len(rows)] - self.low))
            at += len(rows)
        return given.count
