"""Order of a leg: the row of the i-th sample of step n, and every cursor after it.

Pure: nothing here reads a file, knows a rank, or keeps state. Steps count from 1 over the whole run. The reader state of step
n is the cursors after it, known for counted sources only (a row is a sample). For streamed ones the order gives the next row.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow
from dlac_pipeline.plan.mixture import Mixture, Present
from dlac_pipeline.plan.source_order import Cursor, SourceOrder
from dlac_pipeline.plan.units import Ints

ReaderState = list[list[Cursor]]
"""The cursor of each source and key group: state[source][group]."""


def reader_state_of(numbers: Sequence[Sequence[Sequence[int]]]) -> ReaderState:
    """Return the reader state that JSON holds: a cursor is [pass, block, position, offset]."""
    return [[Cursor(*cursor) for cursor in cursors] for cursors in numbers]


@dataclass(frozen=True, kw_only=True, slots=True)
class LegSettings:
    """Settings that, with its sources, determine the order of a leg."""

    key_groups: int
    batch_size: int
    start_step: int = 0
    steps: int | None = None
    """Optimizer steps after which the run ends at the latest."""
    pending_tail: bool = False
    """True if rows that do not fill a batch stay for the next leg. Otherwise the last batches have empty slots."""

    def __post_init__(self) -> None:
        if self.batch_size % self.key_groups:
            raise ValueError(f"expected key_groups to divide batch_size, found {self.key_groups} and {self.batch_size}")

    @property
    def samples_per_group(self) -> int:
        """Samples that one key group gives to one global batch (B/G)."""
        return self.batch_size // self.key_groups


@dataclass(frozen=True, slots=True)
class _Phase:
    """Sources that remain from sample `start` of a key group on. `before` counts the samples of each source until then."""

    start: int
    before: Ints
    present: Present


class LegOrder:
    """The order of a leg. `streamed` marks its sources whose samples are not rows, `active` the sources that this leg reads."""

    def __init__(
        self,
        sources: Sequence[SourceOrder],
        mixture: Mixture,
        settings: LegSettings,
        *,
        streamed: Sequence[bool] = (),
        active: Sequence[bool] = (),
    ) -> None:
        self.sources = tuple(sources)
        self.mixture = mixture
        self.settings = settings
        self.streamed = tuple(streamed) or (False,) * len(self.sources)
        self.counted = not any(self.streamed)
        """True if a step alone determines all cursors."""
        self.active: Present = tuple(active) or mixture.everything
        self._phases = lru_cache(maxsize=None)(self._phases_of)

    @cached_property
    def total_steps(self) -> int | None:
        """The last step of the leg, or None if only reading can show it."""
        if not any(self.active):
            return self.settings.start_step
        limit = self.settings.steps
        reads = [source for source, here in zip(self.sources, self.active, strict=True) if here]
        if not self.counted or all(source.endless for source in reads):
            return limit
        per_group = self.settings.samples_per_group
        ends = [self._end(group) for group in range(self.settings.key_groups)]
        steps = min(ends) // per_group if self.settings.pending_tail else -(-max(ends) // per_group)
        last = self.settings.start_step + steps
        return last if limit is None else min(limit, last)

    @cached_property
    def always_full(self) -> bool:
        """True if no batch of the leg has an empty slot, as far as the order shows."""
        last = self.total_steps
        if self.settings.pending_tail or last == self.settings.start_step:
            return True
        if not self.counted or last is None:
            return all(source.endless for source, here in zip(self.sources, self.active, strict=True) if here)
        return self._is_full(last)

    @cached_property
    def last_full_step(self) -> int | None:
        """The last step with a full batch, or None if each batch is full and none is the last. Counted sources only."""
        first, last = self.settings.start_step, self.total_steps
        if last is None:
            return None
        nearly = last if last <= first or self._is_full(last) else last - 1
        if nearly <= first or self._is_full(nearly):
            return nearly
        return first + bisect_left(range(first + 1, nearly), True, key=lambda step: not self._is_full(step))

    def _is_full(self, step: int) -> bool:
        return self.valid_rows(step) == self.settings.batch_size

    def samples(self, step: int) -> int:
        """Slots of each key group from the leg's beginning to the end of `step`."""
        return (step - self.settings.start_step) * self.settings.samples_per_group

    def consumed(self, step: int) -> Ints:
        """Return the rows of the leg that each key group has consumed after `step`, int64 [sources, G]. Counted sources only.

        A step after the last one consumes none.
        """
        last = self.total_steps
        slots, groups = self.samples(step if last is None else min(step, last)), range(self.settings.key_groups)
        return np.stack([self._consumed_of(group, slots) for group in groups], axis=1)

    def valid_rows(self, step: int) -> int:
        """Return the valid samples of the global batch of `step`: B, or fewer at the very end. Counted sources only."""
        return int((self.consumed(step) - self.consumed(step - 1)).sum())

    def reader_state(self, step: int) -> ReaderState:
        """Return all cursors after `step`. Counted sources only."""
        consumed = self.consumed(step)
        return [
            [source.cursor(group, int(count)) for group, count in enumerate(consumed[index])]
            for index, source in enumerate(self.sources)
        ]

    def advances(self, group: int, first_step: int, last_step: int, *, applied: bool) -> Iterator[AdvanceRow]:
        """Return advances of first_step..last_step in `group`, one per (source, pass, block). Counted sources only."""
        before, after = (self._consumed_of(group, self.samples(step)) for step in (first_step - 1, last_step))
        for index, source in enumerate(self.sources):
            start, stop = int(before[index]), int(after[index])
            previous = source.cursor(group, start)
            for row_range in source.row_ranges(group, start, stop):
                cursor = row_range.cursor
                if (previous.pass_index, previous.block) != (cursor.pass_index, cursor.block):
                    previous = Cursor(cursor.pass_index, cursor.block)
                count = row_range.stop - row_range.start
                yield AdvanceRow(
                    source=index,
                    pass_index=cursor.pass_index,
                    key_group=group,
                    block=cursor.block,
                    position_start=previous.position,
                    position_end=cursor.position,
                    first_step=self._step_of(group, index, start),
                    last_step=self._step_of(group, index, start + count - 1),
                    rows_consumed=count,
                    applied=applied,
                )
                start += count
                previous = cursor

    def _step_of(self, group: int, source: int, row: int) -> int:
        """The step that consumes a group's row of a source, both counted since the leg began."""
        for phase in reversed(self._phases(group)):
            if phase.before[source] <= row and phase.present[source]:
                count = row - int(phase.before[source]) + 1
                slot = self.mixture.nth(group, phase.start, source, count, phase.present) - 1
                return self.settings.start_step + slot // self.settings.samples_per_group + 1
        raise IndexError(f"expected a row that the leg reads, found row {row} of source {source}")

    def _consumed_of(self, group: int, slots: int) -> Ints:
        phase = next(phase for phase in reversed(self._phases(group)) if phase.start <= slots)
        if not any(phase.present):
            return phase.before
        return phase.before + self.mixture.counts(group, phase.start, slots, phase.present)

    @cached_property
    def _available(self) -> list[Ints | None]:
        """The rows of each source from the leg's beginning to its end, which no cut changes."""
        return [source.available() for source in self.sources]

    def _phases_of(self, group: int) -> list[_Phase]:
        """The phases of a key group: one more whenever a source is exhausted for it."""
        phase = _Phase(0, np.zeros(len(self.sources), dtype=np.int64), self.active)
        phases = []
        ends = [None if rows is None else int(rows[group]) for rows in self._available]
        while True:
            present = tuple(
                here and (end is None or end > before)
                for here, end, before in zip(phase.present, ends, phase.before.tolist(), strict=True)
            )
            phase = _Phase(phase.start, phase.before, present)
            phases.append(phase)
            stops = [
                self.mixture.nth(group, phase.start, index, end - int(phase.before[index]), present)
                for index, end in enumerate(ends)
                if end is not None and self.mixture.drawn(present)[index]
            ]
            if not stops:
                return phases
            stop = min(stops)
            phase = _Phase(stop, phase.before + self.mixture.counts(group, phase.start, stop, present), present)

    def _end(self, group: int) -> int:
        """The samples of a key group until its last finite source ends, or with a pending tail until the first one does."""
        phases = self._phases(group)
        if not self.settings.pending_tail:
            return phases[-1].start
        if phases[0].present != self.active or not any(self.active):
            return 0
        return phases[1].start
