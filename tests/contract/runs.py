"""A run without model and ledger: a leg, its position, and global batches read by any number of ranks in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count, islice
from typing import Any

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.plan.legs.choice import first_leg, requested_leg
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.legs.next_leg import LegRequest, next_leg
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import OpenLeg, open_leg
from dlac_pipeline.read.reader import Exchange, Sums
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.track.tracker import ReaderStateTracker
from tests.contract.tables import ids_in

Tensors = dict[str, npt.NDArray[Any]]
WITHIN_S = 60.0


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """The slots of all ranks in one step, in slot order. `key_groups` has the key group of each slot."""

    step: int
    tensors: Tensors
    valid: npt.NDArray[np.bool_]
    source: npt.NDArray[np.int64]
    rows: int
    tokens: int
    state: ReaderState
    """All cursors after the step."""

    @property
    def digest(self) -> str:
        """Digest of everything that a model could read from the batch."""
        digest = blake3(f"{self.step} {self.rows} {self.tokens}".encode())
        for name, array in sorted({**self.tensors, "valid": self.valid, "source": self.source}.items()):
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest(length=8)


class Summing:
    """Sums numbers over ranks in threads, call by call."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._changed = threading.Condition()
        self._given: dict[int, list[Sequence[int]]] = {}
        self._broken = False

    def exchange(self) -> Exchange:
        """Return the function with which one rank sums."""
        calls = count()

        def start(counts: Sequence[int]) -> Sums:
            call = next(calls)
            with self._changed:
                self._given.setdefault(call, []).append(counts)
                self._changed.notify_all()
            return partial(self.result, call)

        return start

    def break_off(self) -> None:
        """Stop all waits for a failed rank."""
        with self._changed:
            self._broken = True
            self._changed.notify_all()

    def result(self, call: int) -> Sequence[int]:
        """Return the sums of a call, when all ranks have made it."""
        with self._changed:
            done = self._changed.wait_for(
                lambda: self._broken or len(self._given[call]) == self._world_size, timeout=WITHIN_S
            )
            if self._broken or not done:
                raise BrokenPipeError(f"another rank failed or did not reach call {call}")
            return [sum(each) for each in zip(*self._given[call], strict=True)]


@dataclass
class Run:
    """A run that is committed up to `step`. `batches` has the committed steps, over all legs."""

    lakehouse: Lakehouse
    spec: JobSpec
    leg: Leg
    opened: OpenLeg
    state: ReaderState
    step: int = 0
    batches: list[GlobalBatch] = field(default_factory=list)
    rows_consumed: int = 0
    """The cursors of the advances."""

    @classmethod
    def begin(cls, lakehouse: Lakehouse, spec: JobSpec) -> Run:
        """Plan the sources, before the first step."""
        leg = first_leg(spec, [make_plan(lakehouse, source) for source in spec.sources])
        opened = open_leg(Plans(lakehouse), leg, spec)
        return cls(lakehouse, spec, leg, opened, opened.start_state())

    def turn(self, spec: JobSpec, *, repin: bool) -> bool:
        """Move to the next leg if the spec or the tables require one, and return whether they do."""
        uuids = {
            source.table: str(self.lakehouse.load(source.table).metadata.table_uuid) for source in self.spec.sources
        }
        request = LegRequest(requested=requested_leg(spec, self.leg, uuids), repin=repin)
        after = next_leg(Plans(self.lakehouse), spec, self.leg, request, step=self.step, state=self.state)
        turned = after is not self.leg
        if turned:
            self.spec, self.leg, self.opened = spec, after, open_leg(Plans(self.lakehouse), after, spec)
            self.state = [list(source.start.cursors) for source in after.sources]
        return turned

    def follow(self, other: Run) -> None:
        """Move to another run's leg. Both runs must be at the same step."""
        self.spec, self.leg, self.opened = other.spec, other.leg, other.opened
        self.state = [list(source.start.cursors) for source in other.leg.sources]

    def attempt(
        self, *, world_size: int = 1, steps: int | None, commit: int | None = None, budget_bytes: int = 2**20
    ) -> list[GlobalBatch]:
        """Read up to `steps` batches with ranks that start after the last committed step, and commit the first of them.

        Readers are closed at their position, with blocks read ahead.
        """
        leg, opened = Leg.from_json(self.leg.to_json()), self.opened
        assert leg == self.leg
        summing = Summing(world_size)

        def rank(number: int) -> tuple[range, list[Batch]]:
            order = leg.order(opened.order.sources[0].units)  # a separate order: ranks share no memory
            order.mixture = opened.order.mixture  # its tables take long to make
            reader = replace(opened, order=order).reader(
                coordinate=DataCoordinate(number, world_size),
                step=self.step,
                state=self.state,
                exchange=summing.exchange(),
                budget_bytes=budget_bytes,
            )
            with closing(reader):
                try:
                    return reader.groups, list(islice(reader, steps))
                except BaseException:
                    summing.break_off()
                    raise

        by_rank = _in_threads(rank, world_size)
        read = [
            _join_parts(parts, [groups for groups, _ in by_rank], leg.key_groups)
            for parts in zip(*(batches for _, batches in by_rank), strict=True)
        ]
        if opened.order.counted:
            for batch in read:
                assert batch.state == opened.order.reader_state(batch.step)
        self._commit(read[:commit], by_rank, opened.order)
        return read

    def _commit(self, committed: Sequence[GlobalBatch], by_rank: Any, order: LegOrder) -> None:
        if not committed:
            return
        last = committed[-1]
        for groups, batches in by_rank:
            tracker = ReaderStateTracker(committed_step=self.step, groups=groups)
            for batch in batches[: len(committed)]:
                tracker.step_done(batch, applied=True)
            self.rows_consumed += sum(advance.rows_consumed for advance in tracker.advances())
        if order.counted:
            self.rows_consumed += sum(
                advance.rows_consumed
                for group in range(order.settings.key_groups)
                for advance in order.advances(group, self.step + 1, last.step, applied=True)
            )
        self.batches += committed
        self.step, self.state = last.step, last.state


def rows_left(order: LegOrder, source: int, cursors: Sequence[Cursor]) -> list[int]:
    """Return the ids of the rows of a finite source after these cursors."""
    left: list[int] = []
    mine = order.sources[source]
    for group, cursor in enumerate(cursors):
        for row_range in mine.row_ranges(group, mine.consumed_at(group, cursor)):
            units = row_range.cut.units
            for row in row_range.block.rows_of(row_range.start, row_range.stop).tolist():
                index = int(np.searchsorted(row_range.block.base, row, side="right")) - 1
                slices = row_range.block.slices
                unit = int(slices.unit[index])
                offset = int(slices.first[index] + row - row_range.block.base[index])
                left.append(ids_in(units.file_paths[int(units.file[unit])])[int(units.first_row[unit]) + offset])
    return left


def _in_threads(rank: Callable[[int], Any], world_size: int) -> list[Any]:
    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(rank, number) for number in range(world_size)]
    failed = [err for err in (future.exception() for future in futures) if err is not None]
    for err in sorted(failed, key=lambda err: isinstance(err, BrokenPipeError)):
        raise err
    return [future.result() for future in futures]


def _join_parts(parts: Sequence[Batch], groups: Sequence[range], key_groups: int) -> GlobalBatch:
    """Join the ranks' parts of a step. They must agree about the whole."""
    (step,) = {part.step for part in parts}
    ((rows, tokens),) = {(part.rows, part.tokens) for part in parts}
    by_group: dict[int, list[list[int]]] = {}
    for mine, part in zip(groups, parts, strict=True):
        for group, cursors in zip(mine, part.cursors.tolist(), strict=True):
            assert by_group.setdefault(group, cursors) == cursors, "ranks that share a key group agree on its cursor"
    state = [[Cursor(*by_group[group][source]) for group in range(key_groups)] for source in range(len(by_group[0]))]
    tensors = {name: _end_to_end(name, parts) for name in parts[0].tensors}
    valid, source = (np.concatenate([getattr(part, name).numpy() for part in parts]) for name in ("valid", "source"))
    return GlobalBatch(step=step, tensors=tensors, valid=valid, source=source, rows=rows, tokens=tokens, state=state)


def _end_to_end(name: str, parts: Sequence[Batch]) -> npt.NDArray[Any]:
    arrays = [part.tensors[name].numpy() for part in parts]
    if not name.endswith(".offsets"):
        return np.concatenate(arrays)
    shifts = np.cumsum([0, *(array[-1] for array in arrays)])
    return np.concatenate([[0], *(array[1:] + shift for array, shift in zip(arrays, shifts, strict=False))])
