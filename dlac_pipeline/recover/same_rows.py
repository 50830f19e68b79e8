"""Deaths at the same rows: counted by step, and from the step to the rows of the batch that was in hand.

A row that kills whoever touches it ends every attempt in the same step. What another rule covers (a row group that does not
decode, an error that another attempt would meet again, a hang, a machine that is lost) is not counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from catalog import errors
from catalog.connect import Lakehouse
from dlac_pipeline.nodes.fleet import LOST
from dlac_pipeline.plan.follow import Unreadable
from dlac_pipeline.plan.leg import Leg
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.planner import load_plan
from dlac_pipeline.plan.source_order import SourceOrder
from dlac_pipeline.plan.units import UnitTable
from dlac_pipeline.ranks.group import HANG
from dlac_pipeline.ranks.progress import read_in_hand
from dlac_pipeline.recover.incident import Failure
from dlac_pipeline.spec import JobSpec

Place = tuple[UnitTable, int, int]
"""Units of a plan, a unit of them, and a row in that."""


class Deaths:
    """Counts attempts in a row that died in one step; `times` of them are too many, 0: never."""

    def __init__(self, times: int) -> None:
        self._times = times
        self._step = 0
        self._tried = 0
        """The last step whose rows were quarantined since the last commit; nothing gets better by doing that again."""
        self.count = 0
        """Deaths in a row at the present step."""

    @property
    def undecided(self) -> bool:
        """Whether more such deaths would lead to a quarantine."""
        return 0 < self.count < self._times and self._step > self._tried

    def died(self, failure: Failure, *, committed: bool) -> bool:
        """Note how an attempt ended, which had committed something or not; whether its rows in hand are to be quarantined now."""
        if committed:
            self._step = self._tried = self.count = 0
        if not _counts(failure):
            self._step = self.count = 0
            return False
        self.count = self.count + 1 if failure.in_hand == self._step else 1
        self._step = failure.in_hand
        if not self._times or self.count < self._times or self._step <= self._tried:
            return False
        self._tried, self.count = self._step, 0
        return True


def _counts(failure: Failure) -> bool:
    return failure.in_hand > 0 and failure.kind not in (HANG, LOST) and errors.named(failure.kind) is None


def rows_in_hand(
    lakehouse: Lakehouse, spec: JobSpec, leg: Leg, *, step: int, folder: Path, reason: str
) -> tuple[Unreadable, ...]:
    """The rows of the global batch of `step`, by row group; `folder` is the launch folder of an attempt that had it in hand."""
    units: dict[str, UnitTable] = {}
    for source, mine in zip(spec.sources, leg.sources, strict=True):
        units |= {name: load_plan(lakehouse, name, table=source.table).units for name in mine.start.plan_ids}
    order = leg.order(units)
    found: dict[tuple[str, int], set[int]] = {}
    for table, unit, row in _of_counted(order, step) if order.counted else _of_streamed(order, step, folder):
        place = (table.file_paths[int(table.file[unit])], int(table.row_group[unit]))
        found.setdefault(place, set()).add(int(table.first_row[unit]) + row)
    return tuple(
        Unreadable(path=path, row_group=group, reason=reason, positions=tuple(sorted(rows)))
        for (path, group), rows in sorted(found.items())
    )


def _of_counted(order: LegOrder, step: int) -> Iterator[Place]:
    """Where the steps alone say it."""
    before, after = order.consumed(step - 1), order.consumed(step)
    for index, source in enumerate(order.sources):
        for group in range(order.settings.key_groups):
            for stretch in source.stretches(group, int(before[index, group]), int(after[index, group])):
                positions = stretch.block.positions_of(stretch.start, stretch.stop).tolist()
                yield from _places(source, stretch.pass_index, group, stretch.block.index, positions)


def _of_streamed(order: LegOrder, step: int, folder: Path) -> Iterator[Place]:
    """As the ranks told it when they were given the batch; rows read in part are among them."""
    for source, group, pass_index, block, start, end in read_in_hand(folder, step):
        yield from _places(order.sources[source], pass_index, group, block, list(range(start, end)))


def _places(source: SourceOrder, pass_index: int, group: int, block: int, positions: list[int]) -> Iterator[Place]:
    cut = source.cut_of(pass_index)
    for position in positions:
        yield (cut.units, *cut.block(group, block).place_of(position))
