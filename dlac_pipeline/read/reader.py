"""One rank's reader: from the order and a step to batches of tensors.

1. Rank r of W works on slots [rB/W, (r+1)B/W) of every global batch; slot s belongs to key group s // (B/G).
2. For each of its key groups the rank walks the stretches of the order from where the resumed step left them.
3. Blocks are decoded ahead; a batch is gathered from them by index, straight into one array per column.

Resume requires an unchanged leg; the number of ranks may change.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from catalog.errors import SpecInvalid, UnsupportedColumn
from dlac_pipeline.plan.order import LegOrder, Stretch
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.blocks import Arrays, BlockDecoder, Prefetcher

PREFETCH_BYTES = 256 * 2**20


class RankReader:
    """Batches of rank `rank` of `world_size`, from behind `step` to the end of the order."""

    def __init__(
        self,
        order: LegOrder,
        decoder: BlockDecoder,
        *,
        rank: int,
        world_size: int,
        step: int,
        threads: int = 2,
        budget_bytes: int = PREFETCH_BYTES,
    ) -> None:
        batch_size, per_group = order.settings.batch_size, order.settings.samples_per_group
        if batch_size % world_size:
            raise SpecInvalid(
                f"expected a number of ranks that divides the batch size {batch_size}, found {world_size}"
            )
        self._order = order
        self._world_size = world_size
        self._step = step
        self._slots = batch_size // world_size
        self._decoder = decoder
        self._prefetch = Prefetcher(decoder, threads=threads, budget_bytes=budget_bytes)
        low, high = rank * self._slots, (rank + 1) * self._slots
        self.groups = range(low // per_group, -(-high // per_group))
        self._parts = [
            _GroupPart(
                order,
                self._prefetch,
                group,
                max(0, low - group * per_group),
                min(per_group, high - group * per_group),
                step,
            )
            for group in self.groups
        ]
        self._cursors = np.array([part.cursor for part in self._parts], dtype=np.int64)

    def __iter__(self) -> Iterator[Batch]:
        """The batches of the remaining steps."""
        while self._step < self._order.total_steps:
            yield self._next()

    def close(self) -> None:
        """End the background threads."""
        self._prefetch.close()

    def _next(self) -> Batch:
        self._step += 1
        arrays: Arrays = {}
        valid = np.zeros(self._slots, dtype=np.bool_)
        slot = 0
        for index, part in enumerate(self._parts):
            filled = slot
            for block, rows in part.take():
                self._gather(arrays, block, rows, filled)
                filled += len(rows)
            valid[slot:filled] = True
            self._cursors[index] = part.cursor
            slot += part.width
        if not arrays:
            arrays = {
                name: np.zeros((self._slots, *row.shape[1:]), row.dtype)
                for name, row in self._decoder.first_row.items()
            }
        return Batch(
            step=self._step,
            tensors={name: torch.from_numpy(array) for name, array in arrays.items()},
            valid=torch.from_numpy(valid),
            rows=self._order.valid_rows(self._step),
            world_size=self._world_size,
            cursors=self._cursors.copy(),
        )

    def _gather(self, arrays: Arrays, block: Arrays, rows: Ints, slot: int) -> None:
        for name, values in block.items():
            if name not in arrays:
                arrays[name] = np.zeros((self._slots, *values.shape[1:]), dtype=values.dtype)
            if arrays[name].shape[1:] != values.shape[1:]:
                raise UnsupportedColumn(
                    f"expected lists of {arrays[name].shape[1]} in column {name!r}, found lists of {values.shape[1]}: "
                    "this version reads fixed-length sequences"
                )
            np.take(values, rows, axis=0, out=arrays[name][slot : slot + len(rows)], mode="clip")


class _GroupPart:
    """Samples low..high-1 of what one key group gives to each batch: all of it, unless ranks share the group."""

    def __init__(self, order: LegOrder, prefetch: Prefetcher, group: int, low: int, high: int, step: int) -> None:
        self.width = high - low
        self._group = group
        self._prefetch = prefetch
        self._per_batch = order.settings.samples_per_group
        self._low, self._high = low, high
        self._consumed = int(order.consumed(step)[group])
        self._end = int(order.dealt_before(order.passes)[group])
        self._stretches = order.stretches(group, self._consumed, self._end)
        self._stretch: Stretch | None = None
        self._upcoming = next(self._stretches, None)
        self._ask_upcoming()
        self._at = 0
        self._data: Arrays = {}
        cursor = order.cursor(group, self._consumed)
        self.cursor = (cursor.pass_index, cursor.block, cursor.position)

    def take(self) -> list[tuple[Arrays, Ints]]:
        """The rank's samples of the next batch, as (block, rows in it); the key group's cursor moves over all of them."""
        count = min(self._per_batch, self._end - self._consumed)
        taken = [(data, rows[low:high]) for data, rows, low, high in self._walk(count) if low < high]
        self._consumed += count
        return taken

    def _walk(self, count: int) -> Iterator[tuple[Arrays, Ints, int, int]]:
        done = 0
        while done < count:
            if self._stretch is None or self._at == self._stretch.stop:
                self._enter_next_block()
            stretch = self._stretch
            assert stretch is not None
            stop = min(stretch.stop, self._at + count - done)
            rows = stretch.block.rows_of(self._at, stop)
            yield self._data, rows, max(0, self._low - done), min(len(rows), self._high - done)
            done += stop - self._at
            self._at = stop
            self.cursor = (stretch.pass_index, stretch.block.index, stretch.block.position_after(stop))

    def _enter_next_block(self) -> None:
        stretch = self._upcoming
        assert stretch is not None, "the order ends where the counts of the key groups end"
        self._stretch, self._at = stretch, stretch.start
        self._data = self._prefetch.take(self._key(stretch), stretch.block)
        self._upcoming = next(self._stretches, None)
        self._ask_upcoming()

    def _ask_upcoming(self) -> None:
        if self._upcoming is not None:
            self._prefetch.ask(self._key(self._upcoming), self._upcoming.block)

    def _key(self, stretch: Stretch) -> tuple[int, int, int]:
        return stretch.pass_index, self._group, stretch.block.index
