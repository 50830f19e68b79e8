from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.slots import DataCoordinate, reader_of
from dlac_pipeline.plan.source_order import Cursor, RowRange
from tests.legs import order_of, units_of

EXAMPLES = settings(max_examples=60, deadline=None)
Sample = tuple[int, int, int]
"""(pass, unit, row in the unit)."""


@dataclass(frozen=True)
class Case:
    """A random table and the settings of its reader."""

    rows: list[int]
    dead: dict[int, list[int]]
    seed: int
    key_groups: int
    per_group: int
    block_slices: int
    passes: int
    shuffle: bool

    def order(self) -> LegOrder:
        """Return the order of this case."""
        return order_of(
            units_of(self.rows, self.dead),
            self.passes,
            seed=self.seed,
            key_groups=self.key_groups,
            batch_size=self.key_groups * self.per_group,
            block_slices=self.block_slices,
            shuffle=self.shuffle,
        )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Many tiny units, perhaps a huge one, dead rows anywhere, at least one live row."""
    rows = draw(st.lists(st.integers(1, 6), min_size=1, max_size=30))
    if draw(st.booleans()):
        rows.insert(draw(st.integers(0, len(rows))), draw(st.integers(100, 400)))
    dead: dict[int, list[int]] = {}
    for unit in draw(st.sets(st.integers(0, len(rows) - 1), max_size=8)):
        chosen = draw(st.sets(st.integers(0, rows[unit] - 1), min_size=1))
        dead[unit] = sorted(chosen)
    if sum(rows) == sum(map(len, dead.values())):
        dead = {}
    return Case(
        rows=rows,
        dead=dead,
        seed=draw(st.integers(0, 2**63 - 1)),
        key_groups=draw(st.integers(1, 9)),
        per_group=draw(st.integers(1, 5)),
        block_slices=draw(st.integers(1, 5)),
        passes=draw(st.integers(1, 3)),
        shuffle=draw(st.booleans()),
    )


def samples_of(row_range: RowRange) -> list[Sample]:
    """Return the rows of one range, in reading order."""
    block = row_range.block
    rows = block.rows_of(row_range.start, row_range.stop)
    at = np.searchsorted(block.base, rows, side="right") - 1
    offsets = block.slices.first[at] + rows - block.base[at]
    units = block.slices.unit[at]
    return [(row_range.pass_index, int(unit), int(row)) for unit, row in zip(units, offsets, strict=True)]


def samples(order: LegOrder, group: int, start: int, stop: int) -> list[Sample]:
    """Return the group's samples start .. stop-1, in reading order."""
    return [sample for row_range in order.sources[0].row_ranges(group, start, stop) for sample in samples_of(row_range)]


def ends_of(order: LegOrder) -> list[int]:
    """Return the number of rows of each key group over all passes."""
    available = order.sources[0].available()
    assert available is not None
    return [int(rows) for rows in available]


def total_steps(order: LegOrder) -> int:
    """Return the number of steps of a finite leg."""
    assert order.total_steps is not None
    return order.total_steps


def live(case: Case) -> list[tuple[int, int]]:
    """Return every (unit, row) that is not dead."""
    return [(u, r) for u, rows in enumerate(case.rows) for r in range(rows) if r not in case.dead.get(u, ())]


@EXAMPLES
@given(cases())
def test_every_live_row_once_per_pass(case: Case) -> None:
    """Over all key groups each pass reads every live row exactly once and no dead row."""
    order = case.order()
    ends = ends_of(order)
    read = Counter(sample for group in range(case.key_groups) for sample in samples(order, group, 0, int(ends[group])))
    assert read == Counter((p, u, r) for p in range(case.passes) for u, r in live(case))


@EXAMPLES
@given(cases())
def test_slices_tile_units_with_dead_rows(case: Case) -> None:
    """The slices of a unit have no gap or overlap, and a slice inside it begins with a live row."""
    cut = case.order().sources[0].cut_of(0)
    ends: dict[int, int] = {}
    for group in range(case.key_groups):
        slices = cut.slices(group)
        for unit, first, rows in zip(slices.unit.tolist(), slices.first.tolist(), slices.rows.tolist(), strict=True):
            assert first == ends.get(unit, 0)
            assert first == 0 or first not in case.dead.get(unit, ())
            ends[unit] = first + rows
    assert ends == {unit: case.rows[unit] for unit in {unit for unit, _ in live(case)}}


@EXAMPLES
@given(cases(), st.data())
def test_samples_ignore_reading_start(case: Case, data: st.DataObject) -> None:
    """Reading a key group from any sample gives the tail of reading it from the beginning."""
    order = case.order()
    group = data.draw(st.integers(0, case.key_groups - 1))
    end = ends_of(order)[group]
    start = data.draw(st.integers(0, end))
    assert samples(case.order(), group, start, end) == samples(order, group, 0, end)[start:]


@EXAMPLES
@given(cases())
def test_steps_add_up(case: Case) -> None:
    """The valid rows of all steps are the live rows of all passes. Every step has some, and all but the last ones are full."""
    order = case.order()
    valid = [order.valid_rows(step) for step in range(1, total_steps(order) + 1)]
    assert sum(valid) == case.passes * len(live(case))
    assert all(rows > 0 for rows in valid)
    full = case.key_groups * case.per_group
    assert all(rows == full for rows in valid[: min(ends_of(order)) // case.per_group])
    assert order.valid_rows(total_steps(order) + 1) == 0


@EXAMPLES
@given(cases(), st.data())
def test_advances_are_contiguous(case: Case, data: st.DataObject) -> None:
    """Advances continue at the end of the last one and count every row once, for any division into checkpoints."""
    order = case.order()
    cuts = data.draw(st.sets(st.integers(1, total_steps(order)), max_size=6))
    bounds = [0, *sorted(cuts | {total_steps(order)})]
    for group in range(case.key_groups):
        at = Cursor(0, 0, 0)
        consumed = 0
        for first, last in pairwise(bounds):
            for advance in order.advances(group, first + 1, last, applied=True):
                here = (advance.pass_index, advance.block)
                assert here >= (at.pass_index, at.block)
                assert advance.position_start == (at.position if here == (at.pass_index, at.block) else 0)
                assert advance.position_end - advance.position_start >= advance.rows_consumed > 0
                assert first < advance.first_step <= advance.last_step <= last
                at = Cursor(*here, advance.position_end)
                consumed += advance.rows_consumed
            assert consumed == order.consumed(last)[0, group]
            assert order.sources[0].cursor(group, consumed) == at


def test_slot_names_its_rank() -> None:
    """Each slot has one rank, the one whose slots have it, where the number of ranks divides the batch and where not."""
    for batch_size in range(1, 33):
        for ranks in range(1, batch_size + 1):
            shares = [DataCoordinate(place, ranks).slots(batch_size) for place in range(ranks)]
            named = [reader_of(slot, ranks, batch_size) for slot in range(batch_size)]
            assert named == [place for place, slots in enumerate(shares) for _ in slots]
