from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.cut import CutSettings, PassCut
from dlac_pipeline.plan.source_order import Cursor, OpenCut, RowRange, SourceOrder, SourceStart
from dlac_pipeline.plan.units import UnitTable
from tests.legs import units_of

EXAMPLES = settings(max_examples=20, deadline=None)
Place = tuple[int, int]
"""(unit, row in the unit)."""


def places_of(row_range: RowRange) -> list[Place]:
    """Return the rows of one range, in reading order."""
    block = row_range.block
    rows = block.rows_of(row_range.start, row_range.stop)
    at = np.searchsorted(block.base, rows, side="right") - 1
    offsets = block.slices.first[at] + rows - block.base[at]
    return [(int(unit), int(row)) for unit, row in zip(block.slices.unit[at], offsets, strict=True)]


def rows_of(order: SourceOrder, group: int, start: int, stop: int | None = None) -> list[tuple[int, Place]]:
    """Return (pass, row) of a key group's rows start .. stop-1 of the leg, in reading order."""
    return [
        (row_range.pass_index, place)
        for row_range in order.row_ranges(group, start, stop)
        for place in places_of(row_range)
    ]


def live_in(units: UnitTable) -> set[Place]:
    """Return every row that is not dead."""
    return {(unit, row) for unit in range(len(units)) for row in units.live_offsets(unit).tolist()}


def without(units: UnitTable, rows: set[Place]) -> UnitTable:
    """Return the same units with these rows dead too."""
    dead = {unit: {*offsets.tolist()} for unit, offsets in units.dead.items()}
    for unit, row in rows:
        dead.setdefault(unit, set()).add(row)
    return replace(units, dead={unit: np.array(sorted(offsets), dtype=np.int64) for unit, offsets in dead.items()})


@st.composite
def unit_tables(draw: st.DrawFn) -> UnitTable:
    """A few units of few rows, perhaps a large one, dead rows anywhere, at least one live row."""
    rows = draw(st.lists(st.integers(1, 7), min_size=1, max_size=12))
    if draw(st.booleans()):
        rows.insert(draw(st.integers(0, len(rows))), draw(st.integers(30, 90)))
    dead = {
        unit: sorted(draw(st.sets(st.integers(0, rows[unit] - 1), min_size=1)))
        for unit in draw(st.sets(st.integers(0, len(rows) - 1), max_size=4))
    }
    return units_of(rows, {} if sum(rows) == sum(map(len, dead.values())) else dead)


@st.composite
def cut_settings(draw: st.DrawFn) -> CutSettings:
    """Settings of the cuts of passes."""
    return CutSettings(
        seed=draw(st.integers(0, 2**63 - 1)),
        key_groups=draw(st.integers(1, 6)),
        block_slices=draw(st.integers(1, 4)),
        shuffle=draw(st.booleans()),
        source=draw(st.integers(0, 3)),
    )


@st.composite
def queues(draw: st.DrawFn, *, endless: bool = False) -> tuple[dict[str, UnitTable], list[tuple[str, int]]]:
    """One to four plans, and the number of passes over each."""
    plans = {f"p{index}": draw(unit_tables()) for index in range(draw(st.integers(1, 4)))}
    upcoming = [(plan_id, draw(st.integers(1, 3))) for plan_id in plans]
    if endless:
        upcoming[-1] = (upcoming[-1][0], 0)
    return plans, upcoming


@dataclass
class Model:
    """An independent model of a source: the rows dealt to each key group, and its rows not read yet."""

    settings: CutSettings
    dealt: list[int]
    upcoming: list[tuple[str, int]]
    passes: int = 0
    named: dict[int, OpenCut] = field(default_factory=dict)
    lines: dict[int, list[list[Place]]] = field(default_factory=dict)
    """Pass -> all rows that each key group was dealt, in reading order, including those already read."""
    at: list[tuple[int, int]] = field(default_factory=list)
    """The pass of each key group, and the number of rows that it has passed."""
    read: list[tuple[int, int, Place]] = field(default_factory=list)
    excluded: set[tuple[str, Place]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.at = [(0, 0)] * self.settings.key_groups

    def take(self, group: int, count: int | None, plans: dict[str, UnitTable]) -> list[tuple[int, Place]]:
        """Return the next rows of a key group, or all remaining rows if `count` is None."""
        taken: list[tuple[int, Place]] = []
        pass_index, passed = self.at[group]
        while count is None or len(taken) < count:
            if pass_index == self.passes and not self._enter(plans):
                break
            line = self.lines[pass_index][group]
            if passed == len(line):
                pass_index, passed = pass_index + 1, 0
                continue
            place = line[passed]
            passed += 1
            if (self.named[pass_index].plan_id, place) not in self.excluded:
                taken.append((pass_index, place))
                self.at[group] = (pass_index, passed)
        self.read += [(group, pass_index, place) for pass_index, place in taken]
        return taken

    def exclude(self, plan_id: str, rows: set[Place]) -> None:
        """Exclude these rows of a plan from now on. Those not read yet count as never dealt."""
        fresh = {(plan_id, place) for place in rows} - self.excluded
        for pass_index, lines in self.lines.items():
            for group, line in enumerate(lines):
                left = line if self.at[group][0] < pass_index else line[self.at[group][1] :]
                if self.at[group][0] <= pass_index and self.named[pass_index].plan_id == plan_id:
                    self.dealt[group] -= sum((plan_id, place) in fresh for place in left)
        self.excluded |= fresh

    def _enter(self, plans: dict[str, UnitTable]) -> bool:
        for queue, (plan_id, passes) in enumerate(self.upcoming):
            if passes != -1:
                self.upcoming[queue] = (plan_id, passes - 1 if passes > 1 else -1 if passes == 1 else 0)
                self._cut(plan_id, plans)
                return True
        return False

    def _cut(self, plan_id: str, plans: dict[str, UnitTable]) -> None:
        gone = {place for other, place in self.excluded if other == plan_id}
        cut = PassCut(without(plans[plan_id], gone), self.settings, self.passes, np.array(self.dealt, dtype=np.int64))
        self.named[self.passes] = OpenCut(
            pass_index=self.passes,
            plan_id=plan_id,
            live_plan_id=plan_id,
            dealt_before=tuple(self.dealt),
            settings=self.settings,
        )
        self.lines[self.passes] = [
            [
                place
                for index in range(cut.block_count(group))
                for place in places_of(RowRange(cut, cut.block(group, index), 0, cut.block(group, index).live_rows))
            ]
            for group in range(self.settings.key_groups)
        ]
        self.dealt = [before + len(line) for before, line in zip(self.dealt, self.lines[self.passes], strict=True)]
        self.passes += 1


def fresh(upcoming: Sequence[tuple[str, int]], settings: CutSettings) -> SourceStart:
    """Return a source without any read row."""
    return SourceStart.fresh(settings.key_groups, upcoming)


def cursors_at(order: SourceOrder, consumed: Sequence[int]) -> list[Cursor]:
    """Return the cursor of each key group after `consumed` rows."""
    return [order.cursor(group, count) for group, count in enumerate(consumed)]


def available(order: SourceOrder) -> list[int]:
    """Return the number of rows of each key group. The source must end."""
    rows = order.available()
    assert rows is not None
    return [int(count) for count in rows]


def split_row(order: SourceOrder, group: int, consumed: int) -> Cursor:
    """Return the cursor of a key group inside its next row, as packing leaves it."""
    (row_range,) = order.row_ranges(group, consumed, consumed + 1)
    position = int(row_range.block.positions_of(row_range.start, row_range.stop)[0])
    return Cursor(row_range.pass_index, row_range.block.index, position, 5)


@EXAMPLES
@given(queues(), cut_settings())
def test_each_live_row_once_per_pass(
    queue: tuple[dict[str, UnitTable], list[tuple[str, int]]], settings: CutSettings
) -> None:
    """All key groups together read every live row once, in every pass of every plan, and passes are numbered on."""
    plans, upcoming = queue
    order = SourceOrder(fresh(upcoming, settings), plans, settings)
    read = [row for group in range(settings.key_groups) for row in rows_of(order, group, 0)]
    numbered = [plan_id for plan_id, passes in upcoming for _ in range(passes)]
    expected = [(index, place) for index, plan_id in enumerate(numbered) for place in live_in(plans[plan_id])]
    assert Counter(read) == Counter(expected)
    assert sum(available(order)) == len(expected)


@EXAMPLES
@given(queues(), cut_settings(), st.data())
def test_cursor_counts_consumed_rows(
    queue: tuple[dict[str, UnitTable], list[tuple[str, int]]], settings: CutSettings, data: st.DataObject
) -> None:
    """This holds in a leg that begins in open cuts, and in a partly read row. Cursors only grow."""
    plans, upcoming = queue
    order = SourceOrder(fresh(upcoming, settings), plans, settings)
    consumed = [data.draw(st.integers(0, rows)) for rows in available(order)]
    for start in (order.start, order.finish_at(cursors_at(order, consumed))):
        again = SourceOrder(start, plans, settings)
        for group, rows in enumerate(available(SourceOrder(start, plans, settings))):
            cursors = [again.cursor(group, count) for count in range(rows + 1)]
            assert cursors == sorted(cursors)
            assert len(set(cursors)) == len(cursors)
            fresh_order = SourceOrder(start, plans, settings)
            assert [fresh_order.consumed_at(group, cursor) for cursor in cursors] == list(range(rows + 1))
            for count in range(rows):
                assert fresh_order.consumed_at(group, split_row(again, group, count)) == count


@EXAMPLES
@given(queues(endless=True), cut_settings(), st.data())
def test_legs_read_what_one_leg_reads(
    queue: tuple[dict[str, UnitTable], list[tuple[str, int]]], settings: CutSettings, data: st.DataObject
) -> None:
    """A new leg changes neither rows nor cuts, however uneven the progress of the key groups is."""
    plans, upcoming = queue
    whole = SourceOrder(fresh(upcoming, settings), plans, settings)
    start, done = whole.start, [0] * settings.key_groups
    for _ in range(data.draw(st.integers(1, 5))):
        order = SourceOrder(start, plans, settings)
        cursors = []
        for group in range(settings.key_groups):
            count = data.draw(st.integers(0, 60))
            assert rows_of(order, group, 0, count) == rows_of(whole, group, done[group], done[group] + count)
            done[group] += count
            split = data.draw(st.booleans())
            cursors.append(split_row(order, group, count) if split else order.cursor(group, count))
            if split or count:  # otherwise the cursor stays, perhaps inside a row
                assert cursors[-1] == (split_row if split else SourceOrder.cursor)(whole, group, done[group])
            else:
                assert cursors[-1] == start.cursors[group]
        start = order.finish_at(cursors)
        for opened in start.open:
            assert opened == whole.open_cut_of(opened.pass_index)
        lowest = min(cursor.pass_index for cursor in cursors)
        assert all(lowest <= opened.pass_index < start.next_pass for opened in start.open)


@EXAMPLES
@given(queues(), cut_settings(), st.data())
def test_legs_with_exclusions_and_appends(
    queue: tuple[dict[str, UnitTable], list[tuple[str, int]]], settings: CutSettings, data: st.DataObject
) -> None:
    """Rows excluded between legs are skipped without new cuts, appended plans follow, and key groups stay level."""
    plans, upcoming = queue
    model = Model(settings, [0] * settings.key_groups, list(upcoming))
    start = fresh(upcoming, settings)
    live: dict[str, str] = {plan_id: plan_id for plan_id in plans}
    everything = dict(plans)
    for leg in range(data.draw(st.integers(1, 4)) + 1):
        order = SourceOrder(start, everything, settings)
        consumed = [data.draw(st.integers(0, count)) for count in available(SourceOrder(start, everything, settings))]
        for group, count in enumerate(consumed):
            assert rows_of(order, group, 0, count) == model.take(group, count, plans)
        start = order.finish_at(cursors_at(order, consumed))
        assert list(start.dealt) == model.dealt
        assert start.next_pass == model.passes
        for opened in start.open:
            named = model.named[opened.pass_index]
            assert (opened.dealt_before, opened.settings) == (named.dealt_before, named.settings)
        if data.draw(st.booleans()):
            start = _excluding(start, model, plans, live, everything, data, settings)
        if data.draw(st.booleans()):
            appended = f"a{leg}"
            plans[appended] = everything[appended] = data.draw(unit_tables())
            live[appended] = appended
            passes = data.draw(st.integers(1, 2))
            start = replace(start, upcoming=(*start.upcoming, (appended, passes)))
            model.upcoming.append((appended, passes))
    order = SourceOrder(start, everything, settings)
    for group in range(settings.key_groups):
        assert rows_of(order, group, 0) == model.take(group, None, plans)
    read = Counter((pass_index, place) for _, pass_index, place in model.read)
    for pass_index, named in model.named.items():
        gone = {place for plan_id, place in model.excluded if plan_id == named.plan_id}
        mine = {place for number, place in read if number == pass_index}
        assert live_in(plans[named.plan_id]) - gone <= mine <= live_in(plans[named.plan_id])
    assert all(times == 1 for times in read.values())


def _excluding(
    start: SourceStart,
    model: Model,
    plans: dict[str, UnitTable],
    live: dict[str, str],
    everything: dict[str, UnitTable],
    data: Any,
    settings: CutSettings,
) -> SourceStart:
    """Return the start of a leg that excludes rows of some plan, as `follow` makes it."""
    plan_id = data.draw(st.sampled_from(sorted(plans)))
    known = {place for other, place in model.excluded if other == plan_id}
    left = sorted(live_in(plans[plan_id]) - known)
    rows = data.draw(st.sets(st.sampled_from(left), max_size=len(left) - 1)) if len(left) > 1 else set()
    before = SourceOrder(start, everything, settings).open_rows()
    model.exclude(plan_id, rows)
    now = f"{plan_id} without {len(known | rows)} in leg {len(everything)}"
    everything[now] = without(plans[plan_id], known | rows)
    old, live[plan_id] = live[plan_id], now
    start = replace(
        start,
        open=tuple(replace(cut, live_plan_id=now) if cut.live_plan_id == old else cut for cut in start.open),
        upcoming=tuple((now if each == old else each, passes) for each, passes in start.upcoming),
    )
    removed = before - SourceOrder(start, everything, settings).open_rows()
    assert (removed >= 0).all()
    return replace(start, dealt=tuple((np.array(start.dealt) - removed).tolist()))


@EXAMPLES
@given(unit_tables(), cut_settings())
def test_slices_tile_units_with_dead_rows(units: UnitTable, settings: CutSettings) -> None:
    """The slices of a unit have no gap or overlap, and a slice inside it begins with a live row."""
    cut, live = SourceOrder(fresh([("p", 1)], settings), {"p": units}, settings).cut_of(0), live_in(units)
    ends: dict[int, int] = {}
    for group in range(settings.key_groups):
        slices = cut.slices(group)
        for unit, first, rows in zip(slices.unit.tolist(), slices.first.tolist(), slices.rows.tolist(), strict=True):
            assert first == ends.get(unit, 0)
            assert first == 0 or (unit, first) in live
            ends[unit] = first + rows
    assert ends == {unit: units.rows[unit] for unit, _ in live}


@EXAMPLES
@given(unit_tables(), cut_settings(), st.data())
def test_portions_keep_order(units: UnitTable, cut: CutSettings, data: st.DataObject) -> None:
    """The portions of an unshuffled range have its rows in order, and only the needed slices."""
    order = SourceOrder(SourceStart.fresh(cut.key_groups, [("p", 1)]), {"p": units}, replace(cut, shuffle=False))
    for row_range in order.row_ranges(data.draw(st.integers(0, cut.key_groups - 1)), data.draw(st.integers(0, 5))):
        portions = list(row_range.portions(_portions(len(row_range.block.slices.unit), data.draw(st.integers(1, 3)))))
        found = []
        for part in portions:
            cuts = zip(part.slices.unit.tolist(), part.slices.first.tolist(), part.slices.rows.tolist(), strict=True)
            laid = [(unit, first + row) for unit, first, rows in cuts for row in range(rows)]
            found += [laid[row] for row in part.rows_of(part.start, part.stop).tolist()]
        assert found == places_of(row_range)
        assert portions[-1].cursor == row_range.cursor


def _portions(slices: int, at_once: int) -> list[int]:
    return [min(at_once, slices - first) for first in range(0, slices, at_once)]
