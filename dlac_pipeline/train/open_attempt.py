"""An open attempt of one rank, from a resume point to its end: the reader of its leg, the tracker, and the checkpoint manager."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from dlac_pipeline.checkpoint.commit.ledger_rows import AttemptLeg
from dlac_pipeline.checkpoint.manager import CheckpointManager
from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.checkpoint.store import folder_name_of
from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.lakehouse.ledger.commits import Attempt, finish
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.read.opening.open_leg import OpenLeg, open_leg
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.track.tracker import ReaderStateTracker
from dlac_pipeline.train.rank_reader import Reader, ReplayingReader, open_reader, open_replay
from dlac_pipeline.train.restored_state import RestoredMemory, read_memory


@dataclass(kw_only=True, slots=True)
class OpenAttempt:
    """Part of a rank in an attempt, ready to train. Leg, order and reader change where a run enters its next leg in place."""

    name: Attempt
    point: ResumePoint
    leg: Leg
    order: LegOrder
    reader: Reader
    tracker: ReaderStateTracker
    manager: CheckpointManager
    plans: Plans
    memory: RestoredMemory | None = None
    """The state that the attempt resumes from, if it is in memory."""

    def enter(self, leg: Leg, spec: JobSpec, communicator: Communicator) -> None:
        """Train the next leg from now on. Every step is committed. Collective. Raises as `open_leg`."""
        opened = open_leg(self.plans, leg, spec)
        self.reader.close()
        state, place = opened.start_state(), f"{self.name.nonce}-{leg.index}"
        self.leg, self.order = opened.leg, opened.order
        self.reader = open_reader(opened, self.step, state, communicator, nonce=place)
        self.tracker.cursors = _cursors_of(self.reader, state)
        order, parent = opened.order_apart(), self.manager.head
        self.manager.enter_leg(AttemptLeg(attempt=self.name, leg=leg, is_new=True, order=order, parent=parent))

    @property
    def step(self) -> int:
        """The last finished optimizer step."""
        return self.tracker.step

    @property
    def total_steps(self) -> int | None:
        """The last step of the leg, replays included. None: only reading can show it."""
        replays = self.tracker.replays
        return self.order.total_steps if replays is None else replays.total_steps

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

    def end_run(self, communicator: Communicator, *, stopped: bool) -> str:
        """Finish the run if its last leg is trained, and return the ending: finished, stopped or caught up. Collective.

        Raise `CursorMismatch` if steps of the leg are left to train.
        """
        finished, is_first = not stopped and self.ends_run, communicator.rank == 0
        # only reading shows the end of a streamed leg, which may come before `order.steps`
        total = self.total_steps if self.order.counted else None
        if not stopped and total is not None and self.step < total:
            raise CursorMismatch(f"expected the leg to end at step {total}, found its end at step {self.step}")
        if finished and is_first:
            finish(Ledger(self.plans.lakehouse), self.name, step=self.step)
        communicator.tree.broadcast(b"done" if is_first else None)
        return "finished" if finished else "stopped" if stopped else "caught_up"


def open_attempt(
    spec: JobSpec,
    plans: Plans,
    point: ResumePoint,
    communicator: Communicator,
    *,
    make_reader: Callable[[OpenLeg], Reader] | None = None,
    writer: str = "",
) -> OpenAttempt:
    """Open this rank's part of the attempt that begins at a resume point. Collective. Raises as `check_restored`, `open_leg`.

    `make_reader` replaces the reader of the rank's share. `writer` ends the names of checkpoints, if there are several writers.
    """
    attempt = Attempt(run=spec.run, number=point.attempt, nonce=point.nonce)
    opened = open_leg(plans, Leg.from_json(point.leg), spec)
    replays = spec.launch.on_skipped == "replay"
    memory = read_memory(point, opened.order, replays=replays)
    begun = opened.start_state() if point.leg_is_new else point.cursors
    state = begun if memory is None else memory.cursors
    if not point.leg_is_new:
        check_restored(opened.order, point.step, state)
    if make_reader is None:
        reader = open_reader(opened, point.step, state, communicator, nonce=point.nonce)
    else:
        reader = make_reader(opened)
    tracker = _begin_tracker(point, reader, state, memory, communicator)
    if replays:
        open_again = partial(open_replay, opened, communicator)
        reader = ReplayingReader(reader, open_again, opened, tracker, communicator.tree, skipped_before=point.skipped)
    manager = CheckpointManager(
        spec,
        _trained_leg(point, opened, attempt, writer),
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
        memory=memory,
    )


def _trained_leg(point: ResumePoint, opened: OpenLeg, attempt: Attempt, writer: str) -> AttemptLeg:
    return AttemptLeg(
        attempt=attempt,
        leg=opened.leg,
        is_new=point.leg_is_new,
        order=opened.order_apart(),
        parent=point.checkpoint_id,
        parent_folder=None if point.checkpoint_id is None else folder_name_of(point.manifest_uri),
        parent_damage=point.head_damage if isinstance(point, FromMemory) else "",
        writer=writer,
    )


def _begin_tracker(
    point: ResumePoint, reader: Reader, state: ReaderState, memory: RestoredMemory | None, communicator: Communicator
) -> ReaderStateTracker:
    tracker = ReaderStateTracker(
        committed_step=point.head_step,
        step=point.step,
        groups=reader.groups,
        coordinate=communicator.coordinate,
        speaks=communicator.speaks,
        cursors=_cursors_of(reader, state),
    )
    if memory is not None:
        tracker.losses, tracker.skipped = memory.trained.losses, memory.trained.skipped
        tracker.earlier = memory.advances if communicator.rank == 0 else []
    return tracker


def _cursors_of(reader: Reader, state: ReaderState) -> NDArray[np.int64]:
    """Return the cursors of the key groups that a rank reports, int64 [groups, sources, 4]."""
    return np.array([[source[group] for source in state] for group in reader.groups], dtype=np.int64)


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
