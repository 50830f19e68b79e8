"""Order of one source within a leg: a queue of cuts, which each key group walks as one line of live rows.

In: the source's state when the leg began (open cuts, cursors, rows dealt, plans to cut next). Out: the i-th row of a key
group since then, its cursor after it, and the source's state when the leg ends.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from dlac_pipeline.plan.cut import Block, CutSettings, PassCut, Slices, deal
from dlac_pipeline.plan.units import Ints, UnitTable


class Cursor(NamedTuple):
    """Position of a key group in a source: after its last whole row, or `offset` items into the row at `position`."""

    pass_index: int = 0
    block: int = 0
    position: int = 0
    offset: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenCut:
    """The name of a pass's cut, and its inputs except units. Open until every key group has finished it."""

    pass_index: int
    plan_id: str
    """The plan whose units were cut."""
    live_plan_id: str
    """The plan whose dead rows are skipped: the same units, perhaps with exclusions."""
    dealt_before: tuple[int, ...]
    settings: CutSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceStart:
    """State of a source when a leg begins."""

    cursors: tuple[Cursor, ...]
    dealt: tuple[int, ...]
    """Live rows dealt to each key group so far, open cuts included (t_g)."""
    upcoming: tuple[tuple[str, int], ...]
    """Plans to cut next, and passes over each. 0 passes: without end."""
    next_pass: int = 0
    open: tuple[OpenCut, ...] = ()

    @classmethod
    def fresh(cls, key_groups: int, upcoming: Sequence[tuple[str, int]]) -> "SourceStart":
        """The start of a source before its first row is read."""
        return cls(cursors=(Cursor(),) * key_groups, dealt=(0,) * key_groups, upcoming=tuple(upcoming))

    @property
    def live_plan_ids(self) -> list[str]:
        """The plans whose dead rows are passed over, in order of their cuts."""
        cuts = [cut.live_plan_id for cut in self.open]
        return list(dict.fromkeys([*cuts, *(plan_id for plan_id, _ in self.upcoming)]))

    @property
    def plan_ids(self) -> list[str]:
        """Every plan that is needed to read on, in order of their cuts."""
        cuts = [plan_id for cut in self.open for plan_id in (cut.plan_id, cut.live_plan_id)]
        return list(dict.fromkeys([*cuts, *(plan_id for plan_id, _ in self.upcoming)]))


@dataclass(frozen=True, slots=True)
class RowRange:
    """Consecutive rows of one key group inside one block of a cut: live rows start .. stop-1 of it."""

    cut: PassCut
    block: Block
    start: int
    stop: int
    portion: tuple[int, int] | None = None
    """The slices of the block, first and end, that contain these rows, or None for all of them."""

    @property
    def pass_index(self) -> int:
        """The pass."""
        return self.cut.pass_index

    @property
    def slices(self) -> Slices:
        """The slices that must be decoded to read these rows."""
        return self.block.slices if self.portion is None else self.block.slices.part(*self.portion)

    def rows_of(self, live_start: int, live_stop: int) -> Ints:
        """Rows of `slices` laid end to end that are the live rows live_start .. live_stop-1 of the block, int64."""
        rows = self.block.rows_of(live_start, live_stop)
        return rows if self.portion is None else rows - self.block.base[self.portion[0]]

    def portions(self, slices_at_once: Sequence[int]) -> "Iterator[RowRange]":
        """Divide the rows of an unshuffled block by its slices. `slices_at_once`: numbers of slices decoded together."""
        ends = np.cumsum(self.block.slices.live)
        first = 0
        for count in slices_at_once:
            last = first + count
            start, stop = (int(ends[first - 1]) if first else 0), int(ends[last - 1])
            part = RowRange(self.cut, self.block, max(start, self.start), min(stop, self.stop), (first, last))
            if part.start < part.stop:
                yield part
            first = last

    @property
    def cursor(self) -> Cursor:
        """Return the cursor after this range."""
        return Cursor(self.pass_index, self.block.index, self.block.position_after(self.stop))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    """A cut of the queue. `begins` and `ends` count a key group's rows since the leg began, `passed` its rows before that."""

    cut: OpenCut
    queue: int
    """Index into the upcoming plans, or -1 for a cut that was open."""
    dealt: Ints
    begins: Ints
    ends: Ints
    passed: Ints


class SourceOrder:
    """The order of one source within a leg. `units` has the units of every plan that `start` names, by plan id."""

    def __init__(self, start: SourceStart, units: Mapping[str, UnitTable], settings: CutSettings) -> None:
        self.start = start
        self.units = units
        self.settings = settings
        self.endless = any(passes == 0 for _, passes in start.upcoming)
        self._dealt = np.array(start.dealt, dtype=np.int64)
        self._entries: list[_Entry] = []
        self._cut = lru_cache(maxsize=4)(self._make_cut)
        for opened in start.open:
            cut = self._cut(opened)
            whole = np.array([cut.live_rows(group) for group in range(self.settings.key_groups)], dtype=np.int64)
            passed = [_passed(cut, group, cursor, int(whole[group])) for group, cursor in enumerate(self.start.cursors)]
            self._add(opened, queue=-1, dealt=whole, passed=np.array(passed, dtype=np.int64))

    def available(self) -> Ints | None:
        """Return the rows of each key group from the leg's beginning to the source's end, int64 [G], or None if endless."""
        if self.endless:
            return None
        cut_so_far, rows = self._next_pass() - self.start.next_pass, 0
        for plan_id, passes in self.start.upcoming:
            uncut = max(0, passes - cut_so_far)
            cut_so_far -= passes - uncut
            rows += uncut * int(self.units[plan_id].live_rows.sum())
        ends = self._entries[-1].ends if self._entries else np.zeros(self.settings.key_groups, dtype=np.int64)
        return ends + deal(rows, self._dealt)  # several passes deal as one pass over all their rows would

    def open_rows(self) -> Ints:
        """Rows of each key group that are left in the cuts which were open when the leg began, int64 [G]."""
        mine = [entry for entry in self._entries if entry.queue < 0]
        return mine[-1].ends if mine else np.zeros(self.settings.key_groups, dtype=np.int64)

    def row_ranges(self, group: int, start: int, stop: int | None = None) -> Iterator[RowRange]:
        """The group's rows start .. stop-1 since the leg began (to the source's end: None), block by block, in reading order."""
        while (stop is None or start < stop) and (entry := self._entry_of(group, start)) is not None:
            cut, shift = self._cut(entry.cut), int(entry.passed[group] - entry.begins[group])
            end = int(entry.ends[group]) if stop is None else min(stop, int(entry.ends[group]))
            bounds = cut.live_before_block(group)
            while start < end:
                block = int(np.searchsorted(bounds, start + shift, side="right")) - 1
                until = min(end, int(bounds[block + 1]) - shift)
                offset = int(bounds[block]) - shift
                yield RowRange(cut, cut.block(group, block), start - offset, until - offset)
                start = until

    def cursor(self, group: int, consumed: int) -> Cursor:
        """Return the cursor of `group` after `consumed` rows of the leg."""
        if consumed == 0:
            return self.start.cursors[group]
        *_, last = self.row_ranges(group, consumed - 1, consumed)
        return last.cursor

    def consumed_at(self, group: int, cursor: Cursor) -> int:
        """The rows of the leg that `group` has wholly consumed at a cursor. Raises `IndexError` for another leg's pass."""
        if cursor == self.start.cursors[group]:
            return 0
        entry = self._of_pass(cursor.pass_index)
        live = self._cut(entry.cut).live_before(group, cursor.block, cursor.position)
        return int(entry.begins[group] - entry.passed[group]) + live

    def cut_of(self, pass_index: int) -> PassCut:
        """The cut of a pass that the leg reads."""
        return self._cut(self._of_pass(pass_index).cut)

    def open_cut_of(self, pass_index: int) -> OpenCut:
        """Return the name of the cut of a pass that the leg reads."""
        return self._of_pass(pass_index).cut

    def finish_at(self, cursors: Sequence[Cursor]) -> SourceStart:
        """Return the source's state when the leg ends with these cursors: the start of the next leg."""
        entered = max(c.pass_index if c > Cursor(c.pass_index) else c.pass_index - 1 for c in cursors)
        while self._next_pass() <= entered and self._add_next():
            pass
        seen = [entry for entry in self._entries if entry.cut.pass_index <= entered or entry.queue < 0]
        mine = [entry for entry in seen if entry.queue >= 0]
        upcoming = []
        for queue, (plan_id, passes) in enumerate(self.start.upcoming):
            remaining = passes - sum(entry.queue == queue for entry in mine)
            if passes == 0 or remaining > 0:
                upcoming.append((plan_id, remaining if passes else 0))
        return SourceStart(
            cursors=tuple(cursors),
            dealt=tuple((np.array(self.start.dealt) + sum(entry.dealt for entry in mine)).tolist()),
            upcoming=tuple(upcoming),
            next_pass=self.start.next_pass + len(mine),
            open=tuple(entry.cut for entry in seen if not self._finished(entry, cursors)),
        )

    def _finished(self, entry: _Entry, cursors: Sequence[Cursor]) -> bool:
        return all(
            cursor.pass_index > entry.cut.pass_index or self.consumed_at(group, cursor) >= int(entry.ends[group])
            for group, cursor in enumerate(cursors)
        )

    def _of_pass(self, pass_index: int) -> _Entry:
        while self._next_pass() <= pass_index and self._add_next():
            pass
        for entry in reversed(self._entries):
            if entry.cut.pass_index == pass_index:
                return entry
        raise IndexError(f"expected a pass that this leg reads, found pass {pass_index}")

    def _entry_of(self, group: int, row: int) -> _Entry | None:
        """Return the entry that contains a row of a key group, or None past the last."""
        while not self._entries or int(self._entries[-1].ends[group]) <= row:
            if not self._add_next():
                return None
        return self._entries[bisect_right(self._entries, row, key=lambda entry: int(entry.ends[group]))]

    def _make_cut(self, named: OpenCut) -> PassCut:
        live = self.units[named.live_plan_id] if named.live_plan_id != named.plan_id else None
        before = np.array(named.dealt_before, dtype=np.int64)
        return PassCut(self.units[named.plan_id], named.settings, named.pass_index, before, live)

    def _add_next(self) -> bool:
        """Cut the next pass of the queue. Return False at its end."""
        cut_so_far = self._next_pass() - self.start.next_pass
        for queue, (plan_id, passes) in enumerate(self.start.upcoming):
            if passes == 0 or cut_so_far < passes:
                opened = OpenCut(
                    pass_index=self._next_pass(),
                    plan_id=plan_id,
                    live_plan_id=plan_id,
                    dealt_before=tuple(self._dealt.tolist()),
                    settings=self.settings,
                )
                dealt = deal(int(self.units[plan_id].live_rows.sum()), self._dealt)
                self._dealt = self._dealt + dealt
                self._add(opened, queue=queue, dealt=dealt, passed=np.zeros_like(dealt))
                return True
            cut_so_far -= passes
        return False

    def _next_pass(self) -> int:
        last = self._entries[-1] if self._entries else None
        return self.start.next_pass if last is None or last.queue < 0 else last.cut.pass_index + 1

    def _add(self, cut: OpenCut, *, queue: int, dealt: Ints, passed: Ints) -> None:
        begins = self._entries[-1].ends if self._entries else np.zeros_like(dealt)
        ends = begins + dealt - passed
        self._entries.append(_Entry(cut=cut, queue=queue, dealt=dealt, begins=begins, ends=ends, passed=passed))


def _passed(cut: PassCut, group: int, cursor: Cursor, whole: int) -> int:
    """Live rows of a cut that a key group had passed where its cursor stands."""
    if cursor.pass_index != cut.pass_index:
        return whole if cursor.pass_index > cut.pass_index else 0
    return cut.live_before(group, cursor.block, cursor.position)
