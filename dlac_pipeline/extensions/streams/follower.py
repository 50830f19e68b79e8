"""Follower of tables: while the ranks train a leg, a thread of rank 0 plans the next one, and all enter it between two steps.

Every step of a leg is committed before the next one is entered, so that each checkpoint is of one leg. While nothing is
appended, the ranks wait, and nothing is at risk.
"""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from pyiceberg.table import Table

from dlac_pipeline.checkpoint.collectives import failure_named, name_failure
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, CommitConflict
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.iceberg.sources import load_version
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.legs.next_leg import LegRequest, next_leg
from dlac_pipeline.plan.order import ReaderState
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.source_order import SourceOrder
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.train.leg_switch import LegSwitch

_log = logging.getLogger(__name__)
_LOOK_S = 0.05
"""Seconds between two looks of waiting ranks for a next leg."""
_POLL_S = 1.0
"""Seconds between two looks at the tables."""
_RELEASE_EVERY = 20
"""Legs after which the pins of earlier ones are released. Each release is a commit to the source table."""


@dataclass(frozen=True, slots=True)
class _End:
    """The end of a leg, where the next one begins."""

    leg: Leg
    step: int
    state: ReaderState
    is_sure: bool
    """False: only reading shows the end. The leg after its beginning is planned instead, to have the plans of its rows."""
    without: tuple[int, ...] = ()
    """Snapshots whose rows are too few for a batch."""


class NextLegs:
    """Planner of next legs, in a thread of rank 0."""

    def __init__(self, plans: Plans, spec: JobSpec) -> None:
        self._plans, self._spec = plans, spec
        self._end: _End | None = None
        self._found: Leg | None = None
        self._failure: Exception | None = None
        self._planned: tuple[int, ...] = ()
        """Snapshots that were looked at for the present end."""
        self._changed, self._is_over = threading.Condition(), False
        self._entered = 0
        self._thread = threading.Thread(target=self._run, name="dlac-follow", daemon=True)
        self._thread.start()

    def follow(self, end: _End) -> None:
        """Plan what comes after an end of a leg."""
        with self._changed:
            if self._end is not None and end.leg.index != self._end.leg.index:
                self._entered += 1
            self._end, self._found, self._planned = end, None, ()
            self._changed.notify()

    def ready(self) -> Leg | None:
        """Return the leg after the last end that was named, if it has a batch. Raise what prevents to plan it."""
        with self._changed:
            if self._failure is not None:
                raise self._failure
            return self._found

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_over = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                end, known = self._end, self._planned
                if self._is_over:
                    return
                is_planned = self._found is not None or (bool(known) and end is not None and not end.is_sure)
            if end is not None and not is_planned:
                self._look(end, known)
            with self._changed:
                if self._end is end and not self._is_over:
                    self._changed.wait(_POLL_S)

    def _look(self, end: _End, known: tuple[int, ...]) -> None:
        try:
            snapshots = tuple(
                snapshot_of(load_version(self._plans.lakehouse, source.table), None).snapshot_id
                for source in self._spec.sources
            )
            if self._entered >= _RELEASE_EVERY:
                self._entered = 0
                self._plans.release_old_pins(self._spec.run, [source.table for source in self._spec.sources])
            is_new = snapshots not in (known, end.without) and self._has_batch(end)
            leg = self._plan(end) if is_new else None
        except (CatalogUnreachable, CommitConflict) as err:
            _log.warning("expected to plan the next leg, found %s; it is tried again", err)
            return
        except Exception as err:  # the ranks raise it
            with self._changed:
                self._failure = err
            return
        with self._changed:
            self._failure = None  # that of an earlier look is over
            if self._end is end:
                self._planned, self._found = snapshots, leg

    def _has_batch(self, end: _End) -> bool:
        """Return False if fewer rows are left and appended than a batch has. To plan them would pin a snapshot in vain."""
        if not end.is_sure or any(end.leg.streamed):
            return True
        order = end.leg.order({each: self._plans.read(each).units for each in end.leg.plan_ids})
        left = 0
        for index, (mine, source) in enumerate(zip(end.leg.sources, order.sources, strict=True)):
            start = source.finish_at(end.state[index])
            rows = SourceOrder(start, source.units, end.leg.cut_settings(index)).available()
            more = _appended(load_version(self._plans.lakehouse, mine.table), mine.snapshot_id)
            if rows is None or more is None:
                return True
            left += int(rows.sum()) + more
        return left >= end.leg.batch_size

    def _plan(self, end: _End) -> Leg | None:
        request = LegRequest(requested=end.leg, repin=True)
        sources = zip(self._spec.sources, end.leg.sources, strict=True)  # a rewind may exclude more than the spec does
        spec = self._spec.with_sources(
            [each.model_copy(update={"exclude": list(mine.exclude)}) for each, mine in sources]
        )
        leg = next_leg(self._plans, spec, end.leg, request, step=end.step, state=end.state)
        self._plans.keep({*end.leg.plan_ids, *leg.plan_ids})
        if leg is end.leg or not end.is_sure:
            return None
        order = leg.order({each: self._plans.read(each).units for each in leg.plan_ids})
        total = order.total_steps if order.counted else None
        return leg if total is None or total > end.step else None


def _appended(table: Table, since: int) -> int | None:
    """Return the rows that snapshots after `since` have added. None: `since` has expired."""
    added, snapshot = 0, table.current_snapshot()
    while snapshot is not None and snapshot.snapshot_id != since:
        added += int((snapshot.summary["added-records"] if snapshot.summary else None) or 0)
        snapshot = None if snapshot.parent_snapshot_id is None else table.snapshot_by_id(snapshot.parent_snapshot_id)
    return None if snapshot is None else added


class StreamFollower:
    """The follower of one rank."""

    def __init__(self, switch: LegSwitch) -> None:
        self._switch = switch
        self._legs = NextLegs(switch.plans, switch.spec) if switch.rank == 0 else None
        self._end: _End | None = None
        """At rank 0, the end of the last leg that a checkpoint names."""
        self._look_ahead()

    def enter_next(self) -> bool:
        """Wait for rows after the leg that has ended, and enter the next one. Collective. False: the run ends here or stops."""
        switch, legs = self._switch, self._legs
        if switch.ends_run:
            return False
        began = time.monotonic()
        if switch.commit("leg"):
            state = switch.reader_state()
            self._end = None if state is None else _End(switch.leg, switch.step, state, is_sure=True)
        elif self._end is not None:  # no checkpoint names the leg, and the next one takes its place
            self._end = replace(self._end, without=tuple(source.snapshot_id for source in switch.leg.sources))
        if legs is not None and self._end is not None and switch.last_step is None:
            legs.follow(self._end)
        while not (decided := switch.idle({} if legs is None else _decision(legs.ready))):
            if switch.stops:
                return False
            time.sleep(_LOOK_S)
        if switch.stops:
            return False
        if "error" in decided:
            raise failure_named(tuple(decided["error"]))
        switch.enter(Leg.from_json(decided["leg"]))
        self._look_ahead()
        _log.info("leg %d begins after %.2f s", switch.leg.index, time.monotonic() - began)
        return True

    def close(self) -> None:
        """End the background thread."""
        if self._legs is not None:
            self._legs.close()

    def _look_ahead(self) -> None:
        """Begin to plan the leg after the present one."""
        switch = self._switch
        if self._legs is None or switch.ends_run:
            return
        last = switch.last_step
        step = switch.leg.start_step if last is None else max(last, switch.step)
        state = [list(source.start.cursors) for source in switch.leg.sources] if last is None else switch.state_at(step)
        self._legs.follow(_End(switch.leg, step, state, is_sure=last is not None))


def _decision(ready: Callable[[], Leg | None]) -> dict[str, Any]:
    """Return the next leg as JSON, an error, or nothing."""
    try:
        leg = ready()
    except Exception as err:  # all ranks raise it
        return {"error": name_failure(err, doing="the plan of the next leg")}
    return {} if leg is None else {"leg": leg.to_json()}
