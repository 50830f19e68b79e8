"""From a leg and its cursors to the next leg: appended rows become plans of their own, gone and excluded rows exclusions.

What was dealt stays dealt: open cuts are never cut again. Rows that are excluded from them are passed over in place, and count
as never dealt, so that later passes level the key groups.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache

import numpy as np

from dlac_pipeline.lakehouse.errors import EmptyPlan
from dlac_pipeline.lakehouse.iceberg.pins import hold
from dlac_pipeline.lakehouse.iceberg.row_groups import FilesToRead, RowGroup, row_groups_of
from dlac_pipeline.lakehouse.iceberg.snapshots import schema_id_of, snapshot_of
from dlac_pipeline.lakehouse.iceberg.sources import load_version
from dlac_pipeline.plan.cut import CutSettings
from dlac_pipeline.plan.legs.changes import Changes, history_of
from dlac_pipeline.plan.legs.leg import Leg, LegSource, QuarantinedUnit, Unreadable
from dlac_pipeline.plan.legs.next_leg import LegRequest
from dlac_pipeline.plan.order import ReaderState
from dlac_pipeline.plan.plan import Plan, Plans
from dlac_pipeline.plan.planner import find_or_write, make_plan
from dlac_pipeline.plan.source_order import Cursor, SourceOrder, SourceStart
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.spec.job_spec import JobSpec, SourceSpec

Dead = dict[int, Ints]
"""Unit -> sorted offsets of rows that are skipped."""
_FACTS = ("source_table", "table_uuid", "snapshot_id", "tag", "schema_id", "row_filter", "columns", "exclude")
"""Fields of a plan's row that do not depend on its units."""


def change_leg(plans: Plans, spec: JobSpec, leg: Leg, request: LegRequest, *, step: int, state: ReaderState) -> Leg:
    """Return the leg after `leg` as `next_leg` does, for a request that may change something."""
    requested, repin, unreadable = request.requested, request.repin, request.unreadable
    changed = requested.bound() != leg.bound()
    sources, emptied = [], []
    for index, (source, mine, wanted) in enumerate(zip(spec.sources, leg.sources, requested.sources, strict=True)):
        turn = _SourceTransition(plans, source, mine, wanted, leg.cut_settings(index))
        current = turn.finish(state[index])
        after = turn.next(current, repin=repin, unreadable=unreadable)
        changed = changed or after.start != current or after.snapshot_id != mine.snapshot_id
        sources.append(after)
        emptied.append(turn.is_emptied)
    if all(emptied):  # one of several sources may be left out as a whole
        raise EmptyPlan(
            f"expected live rows in {[source.table for source in spec.sources]!r}, found that the exclusions "
            f"{[text for wanted in requested.sources for text in wanted.exclude]!r} leave none: exclude fewer rows"
        )
    if not changed:
        return leg  # else a new one even if no source has enough for a batch: the old one would read rows that are gone
    return replace(requested, index=leg.index + 1, start_step=step, sources=tuple(sources))


class _SourceTransition:
    def __init__(
        self, plans: Plans, source: SourceSpec, mine: LegSource, wanted: LegSource, settings: CutSettings
    ) -> None:
        self._plans = plans
        self._lakehouse = plans.lakehouse
        self._source = source
        self._mine = mine
        self._wanted = wanted
        self._settings = settings
        self._table = self._lakehouse.load(source.table)
        self._checked: dict[str, Plan] = {}
        """Plans whose table and pin were checked in this transition."""
        self._changes = cache(self._read_changes)
        self.is_emptied = False
        """True if new exclusions leave no row of the source, read already or not."""

    def finish(self, cursors: Sequence[Cursor]) -> SourceStart:
        return self._order(self._mine.start).finish_at(cursors)

    def next(self, current: SourceStart, *, repin: bool, unreadable: Sequence[Unreadable]) -> LegSource:
        following = self._mine.follow == "appends"
        until = self._mine.snapshot_id
        if following and repin:
            self._table = load_version(self._lakehouse, self._source.table)
            until = snapshot_of(self._table, None).snapshot_id
        elif not following:
            until = self._wanted.snapshot_id
            self._table = load_version(self._lakehouse, self._source.table, until)
            current = self._with_passes(current)
        start = self._excluding(current, until, unreadable)
        after = replace(self._wanted, plan_id=self._planned_last(start, unreadable), start=start)
        if until != self._mine.snapshot_id:
            after = self._repinned(after, until)
        rows = self._order(after.start).available()
        return replace(
            after,
            active=not following or (rows is not None and bool(rows.min() > 0)),
            quarantined=self._quarantined(current, unreadable),
        )

    def _quarantined(self, current: SourceStart, unreadable: Sequence[Unreadable]) -> tuple[QuarantinedUnit, ...]:
        found: dict[Unreadable, QuarantinedUnit] = {}
        for plan in [self._plan(plan_id) for plan_id in current.live_plan_ids]:
            for each, unit, offsets in _units_of(plan, unreadable):
                rows = int(np.isin(offsets, plan.units.live_offsets(unit)).sum())
                if rows:
                    found[each] = QuarantinedUnit(**asdict(each), rows=rows)
        return tuple(found.values())

    def _with_passes(self, start: SourceStart) -> SourceStart:
        """The source with as many passes to come as the spec asks for."""
        remaining = self._wanted.passes - start.next_pass
        if self._wanted.passes and remaining <= 0:
            return replace(start, upcoming=())
        return replace(start, upcoming=((self._mine.plan_id, remaining if self._wanted.passes else 0),))

    def _planned_last(self, start: SourceStart, unreadable: Sequence[Unreadable]) -> str:
        """The plan over which a later leg may ask for more passes: with all exclusions, even if no pass is to come now."""
        if start.upcoming:
            return start.upcoming[-1][0]
        excludes = tuple(self._wanted.exclude) != self._mine.exclude or unreadable
        if self._mine.follow == "appends" or not excludes:
            return self._mine.plan_id
        return self._without(self._mine.plan_id, self._mine.snapshot_id, unreadable)

    def _repinned(self, after: LegSource, until: int) -> LegSource:
        start = after.start
        if self._mine.follow == "appends":
            hold(self._lakehouse, self._source.table, until, self._source.pin)  # the next history is counted from there
            plans = self._appended(self._changes(self._mine.snapshot_id, until))
            start = replace(start, upcoming=(*start.upcoming, *((plan.row.plan_id, 1) for plan in plans)))
        else:
            source = self._source.model_copy(update={"version": until})
            plans = [self._plans.add(make_plan(self._lakehouse, source))]
            start = replace(start, upcoming=tuple((plans[0].row.plan_id, passes) for _, passes in start.upcoming))
        return replace(
            after,
            snapshot_id=until,
            schema_id=schema_id_of(self._table, snapshot_of(self._table, until)),
            plan_id=plans[-1].row.plan_id if plans else after.plan_id,
            start=start,
        )

    def _appended(self, changes: Changes) -> list[Plan]:
        plans = []
        for portion in changes.portions:
            old = {path: changes.old_rows(portion.snapshot_id, path) for path in portion.files}
            try:
                plan = make_plan(
                    self._lakehouse,
                    self._source.model_copy(update={"version": portion.snapshot_id}),
                    only=portion.files,
                    dead={path: rows for path, rows in old.items() if len(rows)},
                )
            except EmptyPlan:
                continue  # all of it is deleted already, or left out by the filter
            plans.append(self._plans.add(plan))
        return plans

    def _excluding(self, start: SourceStart, until: int, unreadable: Sequence[Unreadable]) -> SourceStart:
        """The source with rows passed over that are gone, excluded or unreadable."""
        now = {plan_id: self._without(plan_id, until, unreadable) for plan_id in start.live_plan_ids}
        if all(before == after for before, after in now.items()):
            return start
        before = self._order(start).open_rows()
        start = replace(
            start,
            open=tuple(replace(cut, live_plan_id=now[cut.live_plan_id]) for cut in start.open),
            upcoming=tuple((now[plan_id], passes) for plan_id, passes in start.upcoming),
        )
        for plan_id, passes in start.upcoming:
            if passes == 0 and not self._plan(plan_id).units.live_rows.any():
                raise EmptyPlan(
                    f"expected live rows in {self._source.table!r}, which is read again and again (passes = 0), found that the "
                    f"exclusions {list(self._wanted.exclude)!r} leave none: exclude fewer rows, or give the source a number of "
                    "passes"
                )
        self.is_emptied = self._leaves_none(now)
        order = self._order(start)
        removed = before - order.open_rows()
        start = replace(start, cursors=tuple(_past_dead(order, group, c) for group, c in enumerate(start.cursors)))
        return replace(start, dealt=tuple((np.array(start.dealt) - removed).tolist()))

    def _leaves_none(self, now: Mapping[str, str]) -> bool:
        """Return True if new exclusions leave no row. `now` maps plans to the rest of their rows."""
        if tuple(self._wanted.exclude) == self._mine.exclude or self._mine.follow == "appends":
            return False
        had, has = (any(self._plan(each).units.live_rows.any() for each in plans) for plans in (now, now.values()))
        return had and not has

    def _without(self, plan_id: str, until: int, unreadable: Sequence[Unreadable]) -> str:
        plan = self._plan(plan_id)
        named = ({unit: offsets} for _, unit, offsets in _units_of(plan, unreadable))
        dead = _merged([self._gone(plan, until), self._newly_excluded(plan), *named])
        reduced = self._plans.add(_exclude_rows(self._plans, plan, dead))
        self._checked[reduced.id] = reduced
        return reduced.id

    def _gone(self, plan: Plan, until: int) -> Dead:
        """Return the rows of a plan that are not live in `until` any more. Files where that is unknown are left out."""
        if until == self._mine.snapshot_id:
            return {}
        changes = self._changes(plan.row.snapshot_id, until)
        gone = {path: changes.gone(path) for path in plan.units.file_paths}
        return _by_unit(plan, {path: rows for path, rows in gone.items() if rows is not None and len(rows)})

    def _newly_excluded(self, plan: Plan) -> Dead:
        """Rows of a plan that the spec's exclusions name, if they are others than those of the plan."""
        if tuple(self._wanted.exclude) == self._mine.exclude:
            return {}
        groups = row_groups_of(
            self._table,
            plan.row.snapshot_id,
            plan.row.row_filter,
            schema=self._table.schemas()[plan.row.schema_id],
            reads=FilesToRead(only=set(plan.units.file_paths)),
            exclude=self._wanted.exclude,
        )
        dead = {(group.file_path, group.row_group): group.dead for group in groups}
        return {unit: dead[place] for unit, place in enumerate(plan.units.places()) if place in dead}

    def _read_changes(self, since: int, until: int) -> Changes:
        on_overwrite, columns = self._source.on_overwrite, self._source.identity_columns
        history = history_of(self._source.table)
        return history(self._table, since, until, on_overwrite=on_overwrite, identity_columns=columns)

    def _order(self, start: SourceStart) -> SourceOrder:
        units = {plan_id: self._plan(plan_id).units for plan_id in start.plan_ids}
        return SourceOrder(start, units, self._settings)

    def _plan(self, plan_id: str) -> Plan:
        if plan_id not in self._checked:
            self._checked[plan_id] = self._plans.load(plan_id, table=self._source.table)
        return self._checked[plan_id]


def _past_dead(order: SourceOrder, group: int, cursor: Cursor) -> Cursor:
    """Return the cursor, or if it is inside a row that is skipped now, the one directly after that row."""
    if not cursor.offset:
        return cursor
    block = order.cut_of(cursor.pass_index).block(group, cursor.block)
    alive = block.live_until(cursor.position + 1) > block.live_until(cursor.position)
    return cursor if alive else Cursor(cursor.pass_index, cursor.block, cursor.position + 1)


def leave_out(plans: Plans, spec: JobSpec, leg: Leg, unreadable: Sequence[Unreadable]) -> Leg:
    """Return a run's first leg without these row groups."""
    sources = []
    for index, (source, mine) in enumerate(zip(spec.sources, leg.sources, strict=True)):
        turn = _SourceTransition(plans, source, mine, mine, leg.cut_settings(index))
        sources.append(turn.next(mine.start, repin=False, unreadable=unreadable))
    return replace(leg, sources=tuple(sources))


def _exclude_rows(plans: Plans, plan: Plan, dead: Dead) -> Plan:
    """Return a plan of the same units without these rows, or `plan` if it has none of them."""
    groups = []
    for unit, (path, row_group) in enumerate(plan.units.places()):
        known = plan.units.dead.get(unit, np.zeros(0, dtype=np.int64))
        groups.append(
            RowGroup(
                file_path=path,
                row_group=row_group,
                first_row=int(plan.units.first_row[unit]),
                rows=int(plan.units.rows[unit]),
                bytes=int(plan.units.bytes[unit]),
                dead=np.union1d(known, dead[unit]).astype(np.int64) if unit in dead else known,
            )
        )
    if all(len(group.dead) == plan.units.dead_rows(unit) for unit, group in enumerate(groups)):
        return plan
    facts = {name: getattr(plan.row, name) for name in _FACTS}
    return find_or_write(plans.lakehouse, groups, **facts, base_plan_id=plan.row.base_plan_id or plan.row.plan_id)


def _by_unit(plan: Plan, rows: Mapping[str, Ints]) -> Dead:
    """Positions in data files as offsets in units."""
    units, dead = plan.units, {}
    for unit, (path, _) in enumerate(units.places()):
        if path in rows:
            low, high = np.searchsorted(rows[path], [units.first_row[unit], units.first_row[unit] + units.rows[unit]])
            if low < high:
                dead[unit] = rows[path][low:high] - units.first_row[unit]
    return dead


def _units_of(plan: Plan, unreadable: Sequence[Unreadable]) -> Iterator[tuple[Unreadable, int, Ints]]:
    """Yield those that a plan has, each with its unit and the offsets in it that are left out."""
    units = {place: unit for unit, place in enumerate(plan.units.places())}
    for each in unreadable:
        unit = units.get((each.path, each.row_group))
        if unit is not None:
            positions: Ints = np.array(each.positions, dtype=np.int64) - int(plan.units.first_row[unit])
            yield each, unit, positions if each.positions else np.arange(plan.units.rows[unit], dtype=np.int64)


def _merged(parts: Sequence[Dead]) -> Dead:
    units = {unit for part in parts for unit in part}
    return {
        unit: np.unique(np.concatenate([part[unit] for part in parts if unit in part])).astype(np.int64)
        for unit in units
    }
