"""Switch of a rank from leg to leg in place, for runs that wait for appended rows. An extension decides when, and which leg."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgpack

from dlac_pipeline.checkpoint.commit.ledger_rows import agreed_reader_state
from dlac_pipeline.checkpoint.step_sync import StepSyncs
from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import ReaderState, reader_state_of
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.heartbeat import Phase
from dlac_pipeline.supervise.liveness.heartbeat_writer import HeartbeatWriter
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.train.checkpoint_policy import CheckpointPolicy
from dlac_pipeline.train.checkpointing import Checkpointing
from dlac_pipeline.train.open_attempt import OpenAttempt

FOLLOWERS = Door("dlac.followers", "way to wait for appended rows")
"""An entry has the argument `LegSwitch`, and returns a `Follower`."""


class Follower(Protocol):
    """What decides about the legs of a run, as one rank has it."""

    def enter_next(self) -> bool:
        """Wait for rows after the leg that has ended, and enter the next one. Collective. False: the run ends here or stops."""

    def close(self) -> None:
        """End the background thread."""


@dataclass(kw_only=True, slots=True)
class LegSwitch:
    """The leg of a rank, and its change. Methods are collective unless they say otherwise."""

    spec: JobSpec
    attempt: OpenAttempt
    checkpointing: Checkpointing
    communicator: Communicator
    policy: CheckpointPolicy
    heartbeat: HeartbeatWriter
    events: EventWriter
    has_switched: bool = False
    """True once a leg was entered in place."""

    @property
    def rank(self) -> int:
        """The number of this rank."""
        return self.communicator.rank

    @property
    def plans(self) -> Plans:
        """The plans of the lakehouse."""
        return self.attempt.plans

    @property
    def leg(self) -> Leg:
        """The leg that is trained."""
        return self.attempt.leg

    @property
    def step(self) -> int:
        """The last finished step."""
        return self.attempt.step

    @property
    def ends_run(self) -> bool:
        """True if the run has no further leg."""
        return self.attempt.ends_run

    @property
    def last_step(self) -> int | None:
        """The last step of the leg. None: only reading can show it."""
        return self.attempt.order.total_steps if self.attempt.order.counted else None

    def state_at(self, step: int) -> ReaderState:
        """Return the cursors after a step of a leg whose last step is known. Not collective."""
        return self.attempt.order.reader_state(step)

    def commit(self, reason: str) -> bool:
        """Commit what is trained. Return True if a checkpoint names the leg. Raises as `CheckpointManager.save`.

        A leg that was entered in place has none as long as it has no step.
        """
        self.checkpointing.settle()
        attempt = self.attempt
        is_empty = attempt.step == attempt.leg.start_step
        needs_name = is_empty and not self.has_switched and attempt.point.leg_is_new
        if attempt.step > attempt.tracker.committed_step or needs_name:
            self.checkpointing.take(reason, wait=True)
        return not (is_empty and self.has_switched)

    def reader_state(self) -> ReaderState | None:
        """Return the cursors of all ranks after the last step, at rank 0. Raise `CursorMismatch` if they disagree."""
        tracker, tree = self.attempt.tracker, self.communicator.tree
        cursors = [] if tracker.cursors is None else tracker.cursors.tolist()
        votes = tree.gather(msgpack.packb({"step": tracker.step, "groups": list(tracker.groups), "cursors": cursors}))
        if votes is None:
            return None
        found = [msgpack.unpackb(each) for each in votes]
        return reader_state_of(agreed_reader_state(self.attempt.order, found, tracker.step))

    def idle(self, decision: Mapping[str, Any]) -> dict[str, Any]:
        """Report to the supervisor and to other ranks that this one waits. Return rank 0's decision, empty as long as it waits.

        A "leg" (JSON) in the decision is named to the supervisor, which finds the rows of a step in it. If a rank was asked to
        stop, all ranks stop.
        """
        self.heartbeat.doing(Phase.IDLE, self.step)
        report = self.policy.report(in_background=False)
        syncs = self.communicator.step_syncs
        assert isinstance(syncs, StepSyncs), "replica groups do not wait for appended rows"
        self.policy.on_sync(syncs.report(report))
        if "leg" in decision and not self.stops:  # before a rank can die with rows of it
            self.events.note_leg(decision["leg"])
        mine = json.dumps(decision).encode() if self.rank == 0 else None
        decided: dict[str, Any] = json.loads(self.communicator.tree.broadcast(mine))
        return decided

    def enter(self, leg: Leg) -> None:
        """Train another leg from now on. Raises as `open_leg`."""
        self.attempt.enter(leg, self.spec, self.communicator)
        self.has_switched = True
        self.plans.keep(leg.plan_ids)
        total = self.attempt.total_steps
        self.events.write({"event": "leg", "leg": leg.index, "step": self.step, "total_steps": total})
        self.heartbeat.doing(Phase.TRAINING, self.step)

    @property
    def stops(self) -> bool:
        """True if the run was asked to stop."""
        return self.policy.leaving is not None


def open_follower(switch: LegSwitch) -> Follower | None:
    """Return what decides about the legs of a run. None: its tables are not waited for. Raises `BadInput` as `Door.load`."""
    if not switch.spec.streams or switch.attempt.rehearses:
        return None
    found: Follower = FOLLOWERS.load("stream", setting="source.follow")(switch)
    return found
