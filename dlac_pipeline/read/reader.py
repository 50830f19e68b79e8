"""Reader of one share of the batches: the order and a reader state in, batches of tensors out.

1. Reader r of R reads slots [rB/R, (r+1)B/R) of every global batch, rounded down. Slot s belongs to key group s // (B/G).
2. Each of its key groups divides its slots among the sources, and fills them from one stream per source.
3. Blocks are decoded ahead, and their rows laid out in reading order. Batches are copied from them, into one array per column.

Resume requires an unchanged leg. The number of readers may change.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
import torch.distributed as dist

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.slots import DataCoordinate, groups_of_slots
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.assemble import assemble, assemble_run, shape_of
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.group import GroupBatch, GroupReader, GroupSlots, OpenStream
from dlac_pipeline.read.line import Content
from dlac_pipeline.read.memory import Buffers
from dlac_pipeline.read.packing import ItemLine, Sampler, Stream
from dlac_pipeline.read.prefetch import Prefetcher
from dlac_pipeline.read.samples import Items, Kinds
from dlac_pipeline.read.streams import BlockWalk, Columns, RowStream, SourceBlocks, size_of_segments
from dlac_pipeline.rows.columns import Array, ColumnKind

if TYPE_CHECKING:
    from dlac_pipeline.read.opening.open_leg import OpenLeg

_RUN_BYTES = 2**24
"""Bytes of batches that are gathered together, in one array per column: large enough for large pages of the kernel."""
_ROW_BYTES = 64
"""Bytes of a row beside its values: its place, its source, its offsets."""
_BATCH_BYTES = 2**12
"""Bytes of a batch beside its rows: its Python objects."""
_EMPTY_PASSES = 10
"""Passes per key group: a row that one key group in G gets in each pass is missed by one group in e^10."""
Sums = Callable[[], Sequence[int]]
"""Waits for numbers that are being summed over all readers, and returns the sums."""
Exchange = Callable[[Sequence[int]], Sums]
"""Starts to sum numbers over all readers, without waiting."""


def alone(counts: Sequence[int]) -> Sums:
    """The sums over one reader."""
    return lambda: counts


@dataclass(slots=True)
class Waits:
    """Seconds of waiting for other ranks, until the reader of this count resets it."""

    seconds: float = 0.0


def summing_over(group: dist.ProcessGroup | None, waits: Waits | None = None, *, counts_here: bool = True) -> Exchange:
    """Sums over the readers in a gloo group that nothing else uses, or over this one alone. `waits` counts waiting.

    `counts_here` is false for a process whose reader's counts another process gives.
    """
    waited = waits or Waits()

    def start(counts: Sequence[int]) -> Sums:
        numbers = torch.tensor(counts, dtype=torch.int64) * counts_here
        work = None if group is None else dist.all_reduce(numbers, group=group, async_op=True)

        def wait() -> Sequence[int]:
            if work is not None:
                since = time.monotonic()
                work.wait()
                waited.seconds += time.monotonic() - since
            return [int(number) for number in numbers.tolist()]

        return wait

    return start


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadStart:
    """Start of a reader: its share, the step after which it reads, and the cursors there."""

    coordinate: DataCoordinate
    step: int
    state: ReaderState
    uneven: bool = False
    """Allow a number of readers that does not divide the batch size. Every reader still needs a slot."""


class BatchReader:
    """Batches of one reader, from its start to the end of the leg."""

    def __init__(
        self,
        opened: "OpenLeg",
        open_stream: OpenStream,
        prefetch: Prefetcher,
        buffers: Buffers,
        start: ReadStart,
        *,
        exchange: Exchange = alone,
    ) -> None:
        order = opened.order
        readers, step = start.coordinate.count, start.step
        batch_size, per_group = order.settings.batch_size, order.settings.samples_per_group
        if batch_size < readers or (batch_size % readers and not start.uneven):
            raise SpecInvalid(f"expected a number of ranks that divides the batch size {batch_size}, found {readers}")
        self._order = order
        self._kinds = opened.kinds()
        self._lengths: dict[str, int] = {}
        self._together: Iterator[Batch] = iter(())
        """Batches that were gathered together, and are not given yet."""
        self._streamed = with_sums(order, self._ahead)
        """The batches of a streamed leg. It reads one ahead, so the next loop of a script begins with it."""
        self._buffers = buffers
        self._opened = opened
        self._readers = readers
        self._step = step
        slots = start.coordinate.slots(batch_size)
        low, high, self._slots = slots.start, slots.stop, len(slots)
        self.prefetch = prefetch
        self._exchange = exchange
        self.groups = groups_of_slots(slots, per_group)
        self._parts = [
            GroupReader(
                order.mixture,
                order.active,
                GroupSlots(
                    group=group,
                    slots=per_group,
                    low=max(0, low - group * per_group),
                    high=min(per_group, high - group * per_group),
                ),
                samples_before=order.samples(step),
                cursors=[cursors[group] for cursors in start.state],
                open_stream=open_stream,
            )
            for group in self.groups
        ]

        ends = np.cumsum([0, *(part.width for part in self._parts)]).tolist()
        self._spans = [slice(start, stop) for start, stop in itertools.pairwise(ends)]
        """The slots of each key group in the reader's batch."""

    def __iter__(self) -> Iterator[Batch]:
        return self._counted() if self._order.counted else until_none(partial(next, self._streamed, None))

    def every(self, count: int, first: int = 0) -> Iterator[Batch]:
        """Yield the `first`-th (from 0) of the remaining batches, and every `count`-th from then on, and skip the rest.

        Several processes that take turns for one reader use it. Nothing is exchanged: `rows` and `tokens` of a streamed leg
        count this reader's share, and it ends with this reader's key groups.
        """
        between, last, counted = first, self._order.total_steps, self._order.counted
        while last is None or self._step < last:
            if between:
                taken, source = self._take(give=False)
                if not self._belongs_to_leg(int((source >= 0).sum()), taken):
                    return
                between -= 1
                continue
            rows = self._order.valid_rows(self._step + 1) if counted else 0
            batch, samples, taken = self._read(rows, rows)
            if not self._belongs_to_leg(samples, taken):
                return
            yield batch if counted else replace(batch, rows=samples, tokens=_items_of(taken))
            between = count - 1

    def close(self) -> None:
        """End the background threads."""
        self.prefetch.close()

    def _counted(self) -> Iterator[Batch]:
        last = self._order.total_steps
        while True:
            if (batch := next(self._together, None)) is not None:
                yield batch
            elif last is not None and self._step >= last:
                return
            elif count := self._ready_batches():
                self._together = self._run(count)
            else:
                rows = self._order.valid_rows(self._step + 1)
                yield self._read(rows, rows)[0]

    def _ready_batches(self) -> int:
        """Return how many batches can be gathered together: all full, for every reader, and none but the first one may wait."""
        if not self._lengths:
            return 0
        row_bytes = sum(
            kind.items.itemsize
            * max(1, kind.width or 0, kind.length or 0, self._lengths.get(kind.name, 0))
            * math.prod(kind.inner)
            for kind in self._kinds.values()
        )
        limit = max(1, _RUN_BYTES // ((row_bytes + _ROW_BYTES) * self._slots + _BATCH_BYTES))
        last = self._order.last_full_step
        limit = limit if last is None else min(limit, last - self._step)
        for part in self._parts:
            part.begin_next()
        for part in self._parts:
            if limit <= 0:
                return 0
            limit = part.ready_batches(limit, _RUN_BYTES * part.width // self._slots)
        return limit

    def _run(self, count: int) -> Iterator[Batch]:
        """The next batches, gathered together: what Python costs per key group is shared by all of them."""
        runs = [part.run(count) for part in self._parts]
        pieces = [
            (columns, rows, places, span)
            for span, run in zip(self._spans, runs, strict=True)
            for columns, rows, places in run.pieces
        ]
        tensors: dict[str, torch.Tensor | list[torch.Tensor]] = {}
        for name, kind in self._kinds.items():
            mine = [(columns[name], rows, places, span) for columns, rows, places, span in pieces]
            arrays = assemble_run(kind, mine, count, self._slots, self._buffers, length=self._lengths.get(name, 0))
            for tensor, array in arrays.items():
                is_split = isinstance(array, list)
                tensors[tensor] = [*map(torch.from_numpy, array)] if is_split else torch.from_numpy(array)
        source = torch.from_numpy(np.concatenate([run.source_of for run in runs], axis=1))
        cursors = np.stack([run.cursors for run in runs], axis=1)
        # numpy, because PyTorch wakes all its threads for so many elements
        valid, rows = torch.from_numpy(np.ones(source.shape, dtype=np.bool_)), self._order.settings.batch_size
        for index in range(count):
            self._step += 1
            yield Batch(
                step=self._step,
                tensors={name: tensor[index] for name, tensor in tensors.items()},
                valid=valid[index],
                source=source[index],
                rows=rows,
                tokens=rows,
                readers=self._readers,
                cursors=cursors[index],
            )

    def _ahead(self) -> tuple[Batch, Sums] | None:
        last = self._order.total_steps
        if last is not None and self._step >= last:
            return None
        batch, samples, taken = self._read(0, 0)
        return batch, self._exchange([samples, _items_of(taken), self._lasts(taken), 1])

    def _belongs_to_leg(self, samples: int, taken: Sequence[GroupBatch]) -> bool:
        """Return True if a batch with so many samples of this reader belongs to the leg, as far as this reader knows."""
        if self._order.counted:
            return True
        return self._lasts(taken) and samples >= (self._slots if self._order.settings.pending_tail else 1)

    def _lasts(self, taken: Sequence[GroupBatch]) -> bool:
        """Return True if the leg lasts beyond the batch before, for the key groups of this reader.

        It lasts as long as a finite source remains, or if its rows may stay pending, until the first source ends.
        """
        order = self._order
        if order.settings.pending_tail:
            return all(each.present == order.active and not each.outlasts for each in taken)
        finite = [here and not source.endless for source, here in zip(order.sources, order.active, strict=True)]
        return not any(finite) or any(
            here and ends for each in taken for here, ends in zip(each.present, finite, strict=True)
        )

    def _take(self, *, give: bool = True) -> tuple[list[GroupBatch], Ints]:
        """Take the next batch from the key groups. Return their parts, and the source of each slot of this reader."""
        self._step += 1
        for part in self._parts:
            part.begin_next()
        taken = [part.take(give=give) for part in self._parts]
        mine = [each.source_of[part.low : part.high] for part, each in zip(self._parts, taken, strict=True)]
        return taken, np.concatenate(mine)

    def _read(self, rows: int, tokens: int) -> tuple[Batch, int, list[GroupBatch]]:
        taken, source = self._take()
        batch = Batch(
            step=self._step,
            tensors={name: torch.from_numpy(array) for name, array in self._gather(taken).items()},
            valid=torch.from_numpy(source >= 0),
            source=torch.from_numpy(source),
            rows=rows,
            tokens=tokens,
            readers=self._readers,
            cursors=np.array([part.cursors for part in self._parts], dtype=np.int64),
            moved=()
            if self._order.counted
            else tuple(
                (index, group, advance)
                for group, part, each in zip(self.groups, self._parts, taken, strict=True)
                if part.has_last_slot
                for index, advance in each.advances
            ),
        )
        return batch, int((source >= 0).sum()), taken

    def _gather(self, taken: Sequence[GroupBatch]) -> dict[str, Array]:
        pieces = [
            (columns, rows, slots + span.start)
            for span, each in zip(self._spans, taken, strict=True)
            for columns, rows, slots in each.pieces
        ]
        if not self._lengths:
            self._learn(pieces[0][0] if pieces else self._opened.probe())
        arrays: dict[str, Array] = {}
        for name, kind in self._kinds.items():
            mine = [(columns[name], rows, slots) for columns, rows, slots in pieces]
            arrays |= assemble(kind, mine, self._slots, self._buffers, length=self._lengths.get(name, 0))
        return arrays

    def _learn(self, columns: Columns) -> None:
        """Remember the columns, for batches in which this reader has no sample."""
        for name, column in columns.items():
            listed = column.offsets is None and column.values.ndim > 1
            length = column.values.shape[1] if listed else None
            self._lengths[name] = length or 0
            kind = ColumnKind(name=name, items=column.values.dtype, listed=listed, length=length)
            self._kinds.setdefault(name, replace(kind, inner=column.values.shape[2:]))


def until_none(take: Callable[[], Batch | None]) -> Iterator[Batch]:
    """Yield the results of a function until it returns None. Unlike a generator it has no `close`, so the next loop continues."""
    return cast("Iterator[Batch]", iter(take, None))


def with_sums(order: LegOrder, ahead: Callable[[], tuple[Batch, Sums] | None]) -> Iterator[Batch]:
    """Yield the batches of a streamed leg. `ahead` reads the next one, and starts to sum its counts over all readers.

    One batch is read ahead, because all readers must have read a batch before its total is known.
    """
    upcoming = ahead()
    while upcoming is not None:
        batch, sums = upcoming
        rows, tokens, lasting, readers = sums()
        full = rows == order.settings.batch_size and lasting == readers
        if not rows or not lasting or not (full or not order.settings.pending_tail):
            return
        upcoming = ahead()
        yield replace(batch, rows=rows, tokens=tokens)


def _items_of(taken: Sequence[GroupBatch]) -> int:
    return sum(each.items for each in taken)


def open_streams(opened: "OpenLeg", prefetch: Prefetcher) -> OpenStream:
    """Return the function that opens the stream of a source and a key group, whose blocks are decoded in `prefetch`."""
    first = _first_kinds(opened)
    openers = [_opener(opened, prefetch, index, first) for index in range(len(opened.sources))]
    return lambda source, group, cursor: openers[source](group, cursor)


def _first_kinds(opened: "OpenLeg") -> dict[str, Kinds]:
    """Return the kinds that all transforms must give, as `samples_of` takes them: of sources without one, if any."""
    kinds = {} if opened.leg.sequences.length else opened.kinds()
    found = {name: (f"{'ragged ' * kind.ragged}{kind.items.name}", shape_of(kind)) for name, kind in kinds.items()}
    return {"first": found} if found else {}


def _opener(
    opened: "OpenLeg", prefetch: Prefetcher, index: int, first: dict[str, Kinds]
) -> Callable[[int, Cursor], Stream]:
    source, order, leg = opened.sources[index], opened.order.sources[index], opened.leg
    if not leg.streamed[index]:
        blocks = SourceBlocks(index, order, prefetch, source.segments, size_of_segments, portions=True)
        return lambda group, cursor: RowStream(blocks.walk(group, cursor), cursor)
    if opened.packing is not None:
        documents = source.to_documents(leg.sequences, opened.packing)
        line = partial(opened.packing.line, drain=not leg.following)
        return _open_items(SourceBlocks(index, order, prefetch, documents, _nbytes), line)
    return _open_items(SourceBlocks(index, order, prefetch, source.to_samples(first), _nbytes), Sampler)


def _open_items(
    blocks: SourceBlocks[Content], line: Callable[..., ItemLine[Content]]
) -> Callable[[int, Cursor], ItemLine[Content]]:
    def open_from(group: int, cursor: Cursor) -> ItemLine[Content]:
        walk = blocks.walk(group, cursor)
        return line(_numbered(walk, blocks), start=cursor, close=walk.close)

    return open_from


def _numbered(walk: BlockWalk[Content], blocks: SourceBlocks[Content]) -> Iterator[tuple[int, int, Content]]:
    """Yield (pass, block, content). Raise `SpecInvalid` if an endless source has no item in many passes, or it is read for ever.

    Each pass deals the rows to key groups again, so that a row with an item comes to every key group sooner or later.
    """
    order, last = blocks.order, None
    for row_range, content in walk:
        if last is None or content.rows.items:
            last = row_range.pass_index
        passes = row_range.pass_index - last
        if order.endless and passes > _EMPTY_PASSES * order.settings.key_groups:
            raise SpecInvalid(
                f"expected samples of source {blocks.source}, which is read again and again (passes = 0), found none in {passes} "
                "passes of one key group: check its transform, its documents and its row filter, or leave it out"
            )
        yield row_range.pass_index, row_range.block.index, content


def _nbytes(prepared: Items) -> int:
    return prepared.nbytes
