"""Training run of a replica group: the groups of an attempt divide each global batch among those present.

Made by `training_run()` if the job spec has `launch.replicas`. One step is: a quorum, this group's share of the batch, the
script's `state.reduce(loss)`, and `run.step_done(loss)`. A step that did not commit leaves no trace, and its batch is read again.
"""

import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

from dlac_pipeline.checkpoint.rng import seed_rng
from dlac_pipeline.elastic.sealed_store import shared_secret
from dlac_pipeline.extensions.replicas.checkpointing import GroupSyncs, ReplicaCheckpointing
from dlac_pipeline.extensions.replicas.group import GroupLaunch, ReplicaGroup
from dlac_pipeline.extensions.replicas.own_launch import OwnLaunch
from dlac_pipeline.extensions.replicas.rank import ADDRESS_VARIABLE, REJOINS_VARIABLE, limit_s, take_own_group
from dlac_pipeline.extensions.replicas.share_reader import ShareReader
from dlac_pipeline.lakehouse.errors import ScriptInvalid, TrainingFailed
from dlac_pipeline.plan.slots import DataCoordinate, groups_of_slots
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import OpenLeg
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.heartbeat import Phase
from dlac_pipeline.train.checkpointing import Checkpointing
from dlac_pipeline.train.open_attempt import OpenAttempt, open_attempt
from dlac_pipeline.train.training_run import TrainingRun


class ReplicaRun(TrainingRun):
    """A rank of a replica group of an attempt. `rank` is its number among the ranks of all groups."""

    ends_with_launcher = False  # a group whose launcher has died is a dead group: the others train on

    def __init__(self, folder: Path | None, spec: JobSpec, *, takeover: bool, held: ExitStack) -> None:
        """Join the run, for `training_run`. Without a supervisor, raises as `take_own_group` and `OwnLaunch`."""
        if folder is None:
            take_own_group(spec)
        self._own: OwnLaunch | None = None
        """The launch, without a supervisor."""
        super().__init__(folder, spec, takeover=takeover, held=held)

    def record_step(self, loss: torch.Tensor | float | None, *, applied: bool | None = None) -> bool:
        """Record the step if it committed. Return True if a checkpoint is due. A step that did not commit is read again."""
        if self._batch is not None and self._group.has_met:
            raise ScriptInvalid(
                "expected state.reduce(loss) before run.step_done(loss), found a step that the groups have not reduced"
            )
        if self._batch is not None and self._group.reduced is None:
            self._batch = None
            return False
        self._attempt.tracker.groups = self._attempt.reader.groups
        due = super().record_step(loss, applied=applied)
        self._replica.committed()
        own = self._own
        if own is not None and self._communicator.rank == 0:
            if own.rejoin is not None:
                own.rejoin.step_done(self._lakehouse, self._heartbeat.now(Phase.TRAINING), own.events)
            if self.stopped:
                own.note_stop()
        return due

    def close(self) -> None:
        """Leave the peers, close the reader and the heartbeat."""
        self._group.close()
        super().close()

    def _claim_itself(self, *, takeover: bool, held: ExitStack) -> None:
        """Claim the run without a supervisor, or join the groups that train it."""
        began = time.time()
        self._own = own = OwnLaunch(self._plans, self.spec, self._communicator, takeover=takeover, held=held)
        self.resume_point = own.point
        self._heartbeat = self._heartbeat.moved_to(own.folder, self.rank)
        if own.claimed and self._communicator.rank == 0:
            self._recoveries.events = own.events
            self._recoveries.begin(own.point, claimed_at=began)

    def _open(self) -> tuple[OpenAttempt, Checkpointing]:
        spec, communicator = self.spec, self._communicator
        self._has_finished = False
        """True once everything is committed."""
        launch: GroupLaunch | None = self._own
        if self._folder is not None:
            launch = GroupLaunch(self._folder, rejoins=REJOINS_VARIABLE in os.environ)
            if spec.launch.max_nodes > 1:
                named = f"dlac replica groups of {spec.run} in attempt {self.resume_point.attempt}"
                launch.key = blake3(shared_secret(spec.launch).encode(), derive_key_context=named).digest()
                launch.address = os.environ[ADDRESS_VARIABLE]
        assert launch is not None, "a supervisor or another launcher started this rank"
        self._launch_folder = launch.folder
        number, groups = self.rank // spec.launch.ranks_per_replica, spec.launch.replicas
        self._group = ReplicaGroup(number, groups, launch, communicator, limit_s=limit_s(spec.launch))
        self._group.head_step = self.resume_point.step
        self._group.report = lambda: self._policy.report(in_background=self._attempt.manager.under_way)
        communicator.step_syncs = GroupSyncs(self._group)
        token = communicator.tree.broadcast(secrets.token_hex(2).encode()).decode()
        self._events.open(self._launch_folder if self._group.commits and not self._group.rejoins else None)
        attempt = open_attempt(
            spec,
            self._plans,
            self.resume_point,
            communicator,
            make_reader=lambda opened: QuorumReader(opened, self._next_share),
            writer=f"-{number}-{token}",
        )
        self._replica = ReplicaCheckpointing(
            self._group, spec, attempt, communicator, self._policy, self._heartbeat, self._write_event
        )
        return attempt, self._replica

    def _write_event(self, event: dict[str, Any]) -> None:
        """Write an event. A checkpoint may be committed after another group has become the committer."""
        if event["event"] != "checkpoint":
            self._events.write(event)
            return
        self._events.open(self._launch_folder)
        self._events.write(event)
        self._events.open(self._launch_folder if self._group.commits else None)

    def _next_share(self) -> tuple[int, DataCoordinate] | None:
        """Form the next quorum. Return the step that follows, and this rank's share of it. None: the groups have ended."""
        self._meet()
        return None if self._replica.ends else (self.step + 1, self._group.coordinate)

    def _meet(self) -> None:
        """Form the next quorum. The peers of a newcomer wait until it has a peer's state."""
        began = time.monotonic()
        is_waiting = self._group.has_peers or not self._group.rejoins
        self._note(Phase.WAITING if is_waiting else Phase.LOADING)
        self._group.meet()
        self._note(Phase.TRAINING)
        self._heartbeat.waits.seconds += time.monotonic() - began
        self._events.open(self._launch_folder if self._group.commits else None)

    def _note(self, phase: Phase) -> None:
        """Note a phase. One that has committed everything is past all: the supervisor then needs no other group."""
        self._heartbeat.doing(Phase.DONE if self._has_finished else phase, self.step)

    def _end(self) -> None:
        self._part(self._replica.ends or "end")

    def _leave_early(self) -> bool:
        self._part("left")
        return True

    def _part(self, ends: str) -> None:
        """Meet the groups that have ended too. The committer commits the rest before it parts from them."""
        self._replica.ends, parted = ends, False
        while not parted:
            self._meet()
            if not self._replica.ends:
                raise TrainingFailed(f"expected peers that end at step {self.step} too, found that they train on")
            if self._group.commits:
                self.settle()
                if self.step > self._attempt.tracker.committed_step:
                    self._replica.take(self._replica.ends, wait=True)
                if self._replica.ends == "left" and not self.stopped:
                    super()._leave_early()
                else:
                    super()._end()
                self._has_finished = True
            self._note(Phase.WAITING)
            parted = self._group.part()
        self._has_finished = True
        self._note(Phase.DONE)


class QuorumReader:
    """Reader of a rank of a replica group. The next batch follows the last committed step of the next quorum."""

    def __init__(self, opened: OpenLeg, next_share: Callable[[], tuple[int, DataCoordinate] | None]) -> None:
        self.groups = range(0)
        """Key groups of the last batch."""
        self._settings, self._seed = opened.order.settings, opened.leg.seed
        self._shares = ShareReader(opened)
        self._next_share = next_share

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches, and again the batches of steps that did not commit."""
        while (found := self._next_share()) is not None and self._shares.has(found[0]):
            step, share = found
            slots = share.slots(self._settings.batch_size)
            self.groups = groups_of_slots(slots, self._settings.samples_per_group)
            batch = self._shares.read(step, share)
            seed_rng(self._seed, step, share.index)  # a step depends on its membership only
            yield batch

    def close(self) -> None:
        """End the background threads."""
        self._shares.close()
