"""The order of a leg: which row is the i-th sample of step n, and where every cursor stands after it.

Pure: nothing here reads a file, knows a rank, or remembers what happened. Steps count from 1; step n is the n-th optimizer
step of the run, and the reader state of step n is where the cursors stand after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from dlac_pipeline.plan.cut import Block, OrderSettings, PassCut
from dlac_pipeline.plan.units import Ints, UnitTable


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """Right behind the last consumed row of one key group: (pass, block, position in the block)."""

    pass_index: int
    block: int
    position: int


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive samples of one key group inside one block: live samples start .. stop-1 of it."""

    pass_index: int
    block: Block
    start: int
    stop: int

    @property
    def cursor(self) -> Cursor:
        """Where the cursor stands after this stretch."""
        return Cursor(self.pass_index, self.block.index, self.block.position_after(self.stop))


@dataclass(frozen=True, kw_only=True, slots=True)
class Advance:
    """One block's part of what a checkpoint moved: positions [position_start, position_end), all applied or none."""

    pass_index: int
    group: int
    block: int
    position_start: int
    position_end: int
    first_step: int
    last_step: int
    rows_consumed: int
    applied: bool


class LegOrder:
    """The order of a leg that starts at step 0 with nothing dealt, over `passes` passes of one plan."""

    def __init__(self, units: UnitTable, settings: OrderSettings, passes: int) -> None:
        self.units = units
        self.settings = settings
        self.passes = passes
        self.cut = lru_cache(maxsize=4)(self._cut)
        self._live_rows = int(units.live_rows.sum())

    def _cut(self, pass_index: int) -> PassCut:
        return PassCut(self.units, self.settings, pass_index, self.dealt_before(pass_index))

    def dealt_before(self, pass_index: int) -> Ints:
        """Live rows dealt to each key group before a pass, int64 [G]: level, since every pass deals all live rows."""
        groups = self.settings.key_groups
        return (pass_index * self._live_rows + np.arange(groups, dtype=np.int64)) // groups

    @property
    def total_steps(self) -> int:
        """Optimizer steps until every row of every pass is consumed."""
        return -(-int(self.dealt_before(self.passes).max()) // self.settings.samples_per_group)

    def consumed(self, step: int) -> Ints:
        """Live rows that each key group has consumed after `step`, int64 [G]."""
        return np.minimum(step * self.settings.samples_per_group, self.dealt_before(self.passes))

    def valid_rows(self, step: int) -> int:
        """Valid samples of the global batch of `step`: B, or fewer at the very end."""
        return int((self.consumed(step) - self.consumed(step - 1)).sum())

    def cursor(self, group: int, consumed: int) -> Cursor:
        """Where the cursor of `group` stands after `consumed` live rows."""
        if consumed == 0:
            return Cursor(0, 0, 0)
        *_, last = self.stretches(group, consumed - 1, consumed)
        return last.cursor

    def reader_state(self, step: int) -> list[Cursor]:
        """All cursors after `step`, by key group."""
        return [self.cursor(group, int(consumed)) for group, consumed in enumerate(self.consumed(step))]

    def stretches(self, group: int, start: int, stop: int) -> Iterator[Stretch]:
        """The group's samples start .. stop-1 (counted over all passes), block by block, in reading order."""
        while start < stop:
            pass_index = self._pass_of(group, start)
            before = int(self.dealt_before(pass_index)[group])
            cut = self.cut(pass_index)
            bounds = cut.live_before_block(group)
            index = int(np.searchsorted(bounds, start - before, side="right")) - 1
            end = min(stop, before + int(bounds[index + 1]))
            offset = before + int(bounds[index])
            yield Stretch(pass_index, cut.block(group, index), start - offset, end - offset)
            start = end

    def advances(self, group: int, first_step: int, last_step: int, *, applied: bool) -> Iterator[Advance]:
        """What the steps first_step..last_step moved in `group`, one entry per (pass, block)."""
        per_step = self.settings.samples_per_group
        start, stop = (int(self.consumed(step)[group]) for step in (first_step - 1, last_step))
        seen = start
        previous = self.cursor(group, start)
        for stretch in self.stretches(group, start, stop):
            cursor = stretch.cursor
            if (previous.pass_index, previous.block) != (cursor.pass_index, cursor.block):
                previous = Cursor(cursor.pass_index, cursor.block, 0)
            count = stretch.stop - stretch.start
            yield Advance(
                pass_index=cursor.pass_index,
                group=group,
                block=cursor.block,
                position_start=previous.position,
                position_end=cursor.position,
                first_step=seen // per_step + 1,
                last_step=(seen + count - 1) // per_step + 1,
                rows_consumed=count,
                applied=applied,
            )
            seen += count
            previous = cursor

    def _pass_of(self, group: int, sample: int) -> int:
        """The pass in which the group's `sample`-th live row (0-based) lies: the first with dealt_before(pass + 1) > sample."""
        return ((sample + 1) * self.settings.key_groups - group - 1) // self._live_rows
