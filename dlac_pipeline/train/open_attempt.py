"""An open attempt of one rank, from a resume point to its end: the reader of its leg, the tracker, and the checkpoint manager."""

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlac_pipeline.checkpoint.commit.ledger_rows import AttemptLeg, agreed_reader_state
from dlac_pipeline.checkpoint.manager import CheckpointManager
from dlac_pipeline.checkpoint.memory.states import MemoryState, Trained, check_unchanged, read_state
from dlac_pipeline.checkpoint.store import folder_name_of
from dlac_pipeline.lakehouse.errors import CursorMismatch, DlacError, MemoryStateLost
from dlac_pipeline.lakehouse.iceberg.pins import release_pins
from dlac_pipeline.lakehouse.ledger.arrow_rows import parse_columns
from dlac_pipeline.lakehouse.ledger.commits import Attempt, finish
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.opening.open_leg import open_leg
from dlac_pipeline.read.reader import RankReader
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.track.tracker import ReaderStateTracker
from dlac_pipeline.train.communicator import Communicator

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenAttempt:
    """One rank's part of an attempt, ready to train."""

    name: Attempt
    point: ResumePoint
    leg: Leg
    order: LegOrder
    reader: RankReader
    tracker: ReaderStateTracker
    manager: CheckpointManager
    plans: Plans
    memory: MemoryState | None = None
    """The state that the attempt resumes from, if it is in memory."""

    @property
    def step(self) -> int:
        """The last finished optimizer step."""
        return self.tracker.step

    @property
    def rehearses(self) -> bool:
        """True for a rehearsal, which commits nothing."""
        return self.point.rehearses_until > 0

    @property
    def ends_run(self) -> bool:
        """True if the run is over at the end of the leg. A run that follows appends ends at `order.steps` only."""
        return not self.leg.following or (self.leg.steps is not None and self.step >= self.leg.steps)

    @property
    def has_unrecorded_leg(self) -> bool:
        """True if no checkpoint names the leg, because it had no batch. Its exclusions would be unknown."""
        point = self.point
        unrecorded = point.leg_is_new and self.manager.head == point.checkpoint_id
        return unrecorded and (self.ends_run or point.leaves_out_more)

    @contextmanager
    def loading_memory(self) -> Iterator[None]:
        """While inside, load and check the state from memory, if the attempt resumes from one.

        Raise `MemoryStateLost` if that failed, or if the state changed meanwhile. It is removed, so that the next attempt reads
        a checkpoint.
        """
        if self.memory is None:
            yield
            return
        try:
            yield
            if not check_unchanged(self.memory):
                raise MemoryStateLost("it was written again")
        except Exception as err:
            shutil.rmtree(self.memory.folder.parent, ignore_errors=True)
            raise MemoryStateLost(
                f"expected to resume from the memory state in {str(self.memory.folder)!r}, found {type(err).__name__}: {err}"
            ) from err

    def end_run(self, communicator: Communicator, *, stopped: bool) -> str:
        """Finish the run if its last leg is trained, and return the ending: finished, stopped or caught up. Collective."""
        finished, is_first = not stopped and self.ends_run, communicator.rank == 0
        if finished and is_first:
            finish(Ledger(self.plans.lakehouse), self.name, step=self.step)
        communicator.tree.broadcast(b"done" if is_first else None)
        return "finished" if finished else "stopped" if stopped else "caught_up"


def open_attempt(spec: JobSpec, plans: Plans, point: ResumePoint, communicator: Communicator) -> OpenAttempt:
    """Open this rank's part of the attempt that begins at a resume point. Collective. Raises as `check_restored`, `open_leg`."""
    attempt = Attempt(run=spec.run, number=point.attempt, nonce=point.nonce)
    opened = open_leg(plans, Leg.from_json(point.leg), spec)
    memory = _memory_of(point, opened.order)
    if memory is None:
        state = opened.start_state() if point.leg_is_new else point.cursors
    else:
        state = [[Cursor(*cursor) for cursor in cursors] for cursors in memory.cursors]
    if not point.leg_is_new:
        check_restored(opened.order, point.step, state)
    exchange = communicator.exchange(counted=opened.order.counted)
    reader = opened.reader(
        rank=communicator.rank, world_size=communicator.world_size, step=point.step, state=state, exchange=exchange
    )
    cursors = np.array([[source[group] for source in state] for group in reader.groups], dtype=np.int64)
    tracker = ReaderStateTracker(committed_step=point.head_step, step=point.step, groups=reader.groups, cursors=cursors)
    if memory is not None:
        tracker.losses, tracker.skipped = memory.trained.losses, memory.trained.skipped
        tracker.earlier = memory.advances if communicator.rank == 0 else []
    trained = AttemptLeg(
        attempt=attempt,
        leg=opened.leg,
        is_new=point.leg_is_new,
        order=opened.order_apart(),
        parent=point.checkpoint_id,
        parent_folder=None if point.checkpoint_id is None else folder_name_of(point.manifest_uri),
    )
    manager = CheckpointManager(
        spec,
        trained,
        plans.lakehouse,
        tree=communicator.tree,
        background_tree=communicator.background_tree,
        evicts=communicator.is_first_of_node,
    )
    return OpenAttempt(
        name=attempt,
        point=point,
        leg=opened.leg,
        order=opened.order,
        reader=reader,
        tracker=tracker,
        manager=manager,
        plans=plans,
        memory=None if memory is None else memory.state,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Memory:
    """What an attempt takes from a memory state, beside the files."""

    state: MemoryState
    cursors: list[list[list[int]]]
    trained: Trained
    """The steps since the head."""
    advances: list[AdvanceRow]


def _memory_of(point: ResumePoint, order: LegOrder) -> _Memory | None:
    """Return what a resume point in memory has, or None. Raise `MemoryStateLost` if it is gone by now."""
    if not point.memory_of:
        return None
    state = read_state(Path(str(point.folder)))
    trained = None if state is None or state.first.step != point.step else state.trained_since(point.head_step)
    if state is None or trained is None:
        raise MemoryStateLost(
            f"expected the memory state of step {point.step} in {point.folder!r}, found another one or none"
        )
    advances = [row for row in parse_columns(trained.advances) if isinstance(row, AdvanceRow)]
    try:
        cursors = agreed_reader_state(order, state.votes(), point.step)
    except CursorMismatch as err:
        shutil.rmtree(state.folder.parent, ignore_errors=True)
        raise MemoryStateLost(
            f"expected the cursors of the memory state to be those of the order, found {err}"
        ) from err
    return _Memory(state=state, cursors=cursors, trained=trained, advances=advances)


def release_old_pins(plans: Plans, spec: JobSpec) -> None:
    """Release the pins of earlier legs. A failure is left to the next launch, because all rows were committed."""
    for source in spec.sources:
        try:
            release_pins(plans.lakehouse, spec.run, source.table)
        except (DlacError, OSError) as err:
            _log.warning("expected to release pins that no run needs, found %s; the next launch tries again", err)


def check_restored(order: LegOrder, step: int, found: ReaderState) -> None:
    """Check restored cursors against the order, or raise `CursorMismatch`. Of streamed sources only the digest proves them."""
    if not order.counted:
        return
    for source, (expected, cursors) in enumerate(zip(order.reader_state(step), found, strict=True)):
        for group, (cursor, restored) in enumerate(zip(expected, cursors, strict=True)):
            if cursor != restored:
                raise CursorMismatch(
                    f"expected the cursor of key group {group} in source {source} at {cursor} after step {step}, the "
                    f"checkpoint holds {restored}: the plan or the order changed since it was taken"
                )
