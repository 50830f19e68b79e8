from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.legs.leg import Leg, LegSource
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.source_order import Cursor, SourceStart
from dlac_pipeline.plan.units import UnitTable
from tests.legs import leg_of, source_of, units_of

EXAMPLES = settings(max_examples=25, deadline=None)
WEIGHTS = st.sampled_from([0.02, 0.3, 0.5, 1.0, 4.0])
HORIZON = 240
"""Maximum number of slots that are checked of sources without an end."""


@dataclass(frozen=True)
class Case:
    """A leg over tables in memory."""

    leg: Leg
    units: dict[str, UnitTable]

    def order(self) -> LegOrder:
        """Return the order of the leg."""
        return self.leg.order(self.units)

    @property
    def per_group(self) -> int:
        """Return the slots of a key group in a step."""
        return self.leg.batch_size // self.leg.key_groups


@st.composite
def unit_tables(draw: st.DrawFn) -> UnitTable:
    """A few small units with dead rows anywhere, at least one live row."""
    rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=8))
    dead = {
        unit: sorted(draw(st.sets(st.integers(0, rows[unit] - 1), min_size=1)))
        for unit in draw(st.sets(st.integers(0, len(rows) - 1), max_size=3))
    }
    return units_of(rows, {} if sum(rows) == sum(map(len, dead.values())) else dead)


@st.composite
def cases(draw: st.DrawFn, *, endless: bool = True, follow: bool = False) -> Case:
    """One to four finite sources, perhaps some endless ones, or only followed ones, some without new rows."""
    key_groups = draw(st.integers(1, 5))
    units, sources = {}, []
    for index in range(draw(st.integers(1, 4))):
        plan_id = f"p{index}"
        units[plan_id] = draw(unit_tables())
        passes = 1 if follow else draw(st.integers(0 if endless else 1, 3))
        more: dict[str, Any] = {"follow": "appends", "active": draw(st.booleans()) or not index} if follow else {}
        sources.append(source_of(plan_id, key_groups=key_groups, passes=passes, weight=draw(WEIGHTS), **more))
    without_end = all(source.passes == 0 for source in sources)
    start_step = draw(st.integers(0, 20))
    leg = leg_of(
        *sources,
        key_groups=key_groups,
        batch_size=key_groups * draw(st.integers(1, 4)),
        seed=draw(st.integers(0, 2**63 - 1)),
        block_slices=draw(st.integers(1, 4)),
        shuffle=draw(st.booleans()),
        start_step=start_step,
        steps=start_step + draw(st.integers(1, 30)) if without_end or draw(st.booleans()) else None,
    )
    return Case(leg, units)


def total_steps(order: LegOrder) -> int:
    """Return the last step of a leg that ends."""
    assert order.total_steps is not None
    return order.total_steps


def walk(case: Case, group: int) -> list[int]:
    """Return the source of each slot of a key group, found slot by slot among the sources with rows left, and then -1."""
    order = case.order()
    rows = [source.available() for source in order.sources]
    left = [HORIZON if count is None else int(count[group]) for count in rows]
    found = []
    for slot in range(HORIZON):
        present = tuple(
            here and (count is None or rest > 0) for here, count, rest in zip(order.active, rows, left, strict=True)
        )
        source = int(order.mixture.sources(group, slot, slot + 1, present)[0]) if any(present) else -1
        found.append(source)
        if source >= 0:
            left[source] -= 1
    return found


def walks_of(case: Case) -> list[list[int]]:
    """Return the walk of each key group."""
    return [walk(case, group) for group in range(case.leg.key_groups)]


def last_of(case: Case, walks: list[list[int]]) -> int:
    """Return the leg's last step from the walks: the step of the last row of a finite source, or an earlier limit."""
    finite = [index for index, source in enumerate(case.leg.sources) if source.passes]
    slots = [max((slot + 1 for slot, source in enumerate(each) if source in finite), default=0) for each in walks]
    last = case.leg.start_step - (-max(slots) // case.per_group)
    limit = case.leg.steps
    if not finite:
        assert limit is not None
        return limit
    return last if limit is None else min(last, limit)


@EXAMPLES
@given(cases())
def test_steps_match_slot_by_slot_walk(case: Case) -> None:
    """Counting steps and walking slot by slot give the same rows, remaining sources, cursors and end."""
    order, walks = case.order(), walks_of(case)
    last = total_steps(order)
    if last * case.per_group <= HORIZON // 2:
        assert last == last_of(case, walks)
    for step in range(case.leg.start_step, min(last, case.leg.start_step + HORIZON // case.per_group) + 1):
        slots = (step - case.leg.start_step) * case.per_group
        expected = [[each[:slots].count(source) for each in walks] for source in range(len(case.leg.sources))]
        assert order.consumed(step).tolist() == expected
        state = order.reader_state(step)
        for source, counts in enumerate(expected):
            assert state[source] == [order.sources[source].cursor(group, count) for group, count in enumerate(counts)]


@EXAMPLES
@given(cases(endless=False))
def test_every_row_is_read_in_full_steps(case: Case) -> None:
    """Valid rows add up to all passes of all sources. Every step has some, and is full until a key group is exhausted."""
    case = replace(case, leg=replace(case.leg, steps=None))
    order = case.order()
    steps = range(case.leg.start_step + 1, total_steps(order) + 1)
    valid = [order.valid_rows(step) for step in steps]
    rows = [source.available() for source in order.sources]
    per_source = [int(case.units[source.plan_id].live_rows.sum()) * source.passes for source in case.leg.sources]
    assert [int(count.sum()) for count in rows if count is not None] == per_source
    assert sum(valid) == sum(per_source)
    assert all(count > 0 for count in valid)
    shortest = min(
        sum(int(count[group]) for count in rows if count is not None) for group in range(case.leg.key_groups)
    )
    assert all(count == case.leg.batch_size for count in valid[: shortest // case.per_group])
    assert order.valid_rows(steps.stop) == 0


@EXAMPLES
@given(cases(), st.data())
def test_mixture_advances_are_contiguous(case: Case, data: st.DataObject) -> None:
    """Advances continue at the end of the last one, and name the steps of their rows, for any division into checkpoints."""
    order, walks = case.order(), walks_of(case)
    first = case.leg.start_step
    last = min(total_steps(order), first + HORIZON // case.per_group)
    bounds = sorted(data.draw(st.sets(st.integers(first, last), max_size=5)) | {first, last})
    for group in range(case.leg.key_groups):
        at = [source.cursor(group, 0) for source in order.sources]
        consumed = [0] * len(order.sources)
        for before, after in pairwise(bounds):
            for advance in order.advances(group, before + 1, after, applied=True):
                here, cursor = (advance.pass_index, advance.block), at[advance.source]
                assert here >= cursor[:2]
                assert advance.position_start == (cursor.position if here == cursor[:2] else 0)
                slots = [slot for slot, source in enumerate(walks[group]) if source == advance.source]
                mine = slots[consumed[advance.source] : consumed[advance.source] + advance.rows_consumed]
                steps = [first + slot // case.per_group + 1 for slot in mine]
                assert (advance.first_step, advance.last_step) == (steps[0], steps[-1])
                assert before < advance.first_step <= advance.last_step <= after
                assert advance.rows_dead >= 0
                at[advance.source] = Cursor(*here, advance.position_end)
                consumed[advance.source] += advance.rows_consumed
            assert consumed == order.consumed(after)[:, group].tolist()
            assert at == [source.cursor(group, count) for source, count in zip(order.sources, consumed, strict=True)]


@EXAMPLES
@given(cases(follow=True))
def test_followed_leg_ends_before_short_group(case: Case) -> None:
    """All batches of the leg are full, by the shares of the sources. One more step would exceed some key group's rows."""
    order, walks = case.order(), walks_of(case)
    limit, first = case.leg.steps, case.leg.start_step
    last = total_steps(order)
    assert all(order.valid_rows(step) == case.leg.batch_size for step in range(first + 1, last + 1))
    slots = (last - first) * case.per_group
    rows = [source.available() for source in order.sources]
    active = [index for index, here in enumerate(order.active) if here]
    unhindered = [order.mixture.sources(group, 0, HORIZON, order.active).tolist() for group in range(len(walks))]
    assert [each[:slots] for each in walks] == [each[:slots] for each in unhindered]
    ends = [
        count is not None and unhindered[group][: slots + case.per_group].count(source) >= int(count[group])
        for group in range(len(walks))
        for source, count in enumerate(rows)
        if source in active
    ]
    assert any(ends) or last == limit


@EXAMPLES
@given(cases(follow=True), st.data())
def test_pending_rows_come_in_later_leg(case: Case, data: st.DataObject) -> None:
    """After any append to any source every leg's batches are full, and no row is read twice or skipped."""
    units, leg = dict(case.units), replace(case.leg, steps=None)
    read: list[Counter[tuple[int, int, int, int]]] = [Counter() for _ in leg.sources]
    for turn in range(4):
        order = leg.order(units)
        last = total_steps(order) if any(order.active) else leg.start_step
        _read(order, leg, last, read)
        starts = []
        for index, source in enumerate(leg.sources):
            start = order.sources[index].finish_at(order.reader_state(last)[index])
            if data.draw(st.booleans()):
                plan_id = f"p{index} in {turn}"
                units[plan_id] = data.draw(unit_tables())
                start = replace(start, upcoming=(*start.upcoming, (plan_id, 1)))
            starts.append(_source_in_next_leg(leg, index, source, start, units))
        leg = _next(leg, starts, last)
    order = leg.order(units)
    for index in range(len(leg.sources)):
        left = order.sources[index].available()
        assert left is not None
        plans = {name: each for name, each in units.items() if name.split(" ")[0] == f"p{index}"}
        assert all(times == 1 for times in read[index].values())
        assert sum(read[index].values()) + int(left.sum()) == sum(int(each.live_rows.sum()) for each in plans.values())


def _source_in_next_leg(
    leg: Leg, index: int, source: LegSource, start: SourceStart, units: dict[str, UnitTable]
) -> LegSource:
    """Return the source in the next leg. The leg reads from it only if each key group has rows."""
    moved = replace(
        leg, sources=tuple(replace(one, start=start if one is source else one.start) for one in leg.sources)
    )
    rows = moved.order(units).sources[index].available()
    assert rows is not None
    return replace(source, start=start, active=bool(rows.min() > 0))


def _next(leg: Leg, sources: list[LegSource], last: int, **changes: Any) -> Leg:
    return replace(leg, index=leg.index + 1, start_step=last, sources=tuple(sources), **changes)


def _read(order: LegOrder, leg: Leg, last: int, read: list[Counter[tuple[int, int, int, int]]]) -> None:
    """Record (pass, key group, block, position) of every row up to a step."""
    for group in range(leg.key_groups):
        for index, source in enumerate(order.sources):
            for row_range in source.row_ranges(group, 0, int(order.consumed(last)[index, group])):
                positions = row_range.block.positions_of(row_range.start, row_range.stop).tolist()
                read[index].update((row_range.pass_index, group, row_range.block.index, at) for at in positions)


@EXAMPLES
@given(cases(endless=False), st.data())
def test_settings_change_between_legs(case: Case, data: st.DataObject) -> None:
    """Legs may end at any step and change weights and batch sizes. Each source's rows are read once per pass."""
    leg = replace(case.leg, steps=None)
    read: list[Counter[tuple[int, int, int, int]]] = [Counter() for _ in leg.sources]
    for _ in range(data.draw(st.integers(1, 5))):
        order = leg.order(case.units)
        last = data.draw(st.integers(leg.start_step, total_steps(order)))
        _read(order, leg, last, read)
        state = order.reader_state(last)
        sources = [
            replace(source, start=order.sources[index].finish_at(state[index]), weight=data.draw(WEIGHTS))
            for index, source in enumerate(leg.sources)
        ]
        leg = _next(leg, sources, last, batch_size=leg.key_groups * data.draw(st.integers(1, 5)))
    order = leg.order(case.units)
    _read(order, leg, total_steps(order), read)
    for index, source in enumerate(leg.sources):
        assert all(times == 1 for times in read[index].values())
        assert sum(read[index].values()) == int(case.units[source.plan_id].live_rows.sum()) * source.passes
