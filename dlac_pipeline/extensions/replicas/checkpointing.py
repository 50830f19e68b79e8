"""Checkpoints of a replica group: the committer takes them, and a group that becomes the committer continues after the head."""

import json
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch

from dlac_pipeline.checkpoint.engines import adapt
from dlac_pipeline.checkpoint.manager import Committed
from dlac_pipeline.checkpoint.step_sync import RankReport, StepSync, Syncs
from dlac_pipeline.extensions.replicas.group import Reduced, ReplicaGroup
from dlac_pipeline.lakehouse.errors import HeadMoved, ScriptInvalid
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, fence_of_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, LedgerRow, MembershipRow
from dlac_pipeline.plan.legs.committed_leg import leg_of
from dlac_pipeline.supervise.liveness.heartbeat import Phase
from dlac_pipeline.train.checkpointing import Checkpointing

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    step: int
    loss: float
    applied: bool
    """False if the optimizer skipped the step."""
    groups: tuple[int, ...]


class StepHistory:
    """Losses, results and groups of the committed steps after a checkpoint, in step order."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()

    def add(self, step: int, reduced: Reduced, *, applied: bool = True) -> None:
        """Add the step after the last one."""
        self._steps.append(_Step(step=step, loss=reduced.loss, applied=applied, groups=reduced.groups))

    def forget(self, head_step: int) -> None:
        """Forget steps that a checkpoint has recorded."""
        while self._steps and self._steps[0].step <= head_step:
            self._steps.popleft()

    def losses(self, head_step: int) -> list[float]:
        """Return the losses of the steps after a checkpoint."""
        return [each.loss for each in self._steps if each.step > head_step]

    def skipped(self, head_step: int) -> list[int]:
        """Return the steps after a checkpoint that the optimizer skipped."""
        return [each.step for each in self._steps if each.step > head_step and not each.applied]

    def memberships(self, head_step: int, before: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (first step, groups) where the groups changed after a checkpoint, whose last groups were those `before`."""
        for each in self._steps:
            if each.groups != before and each.step > head_step:
                yield each.step, each.groups
                before = each.groups

    def to_records(self) -> list[dict[str, Any]]:
        """Return the steps as plain values, for a peer."""
        return [asdict(each) for each in self._steps]

    def load(self, records: list[dict[str, Any]]) -> None:
        """Replace the steps by a peer's."""
        self._steps = deque(_Step(**{**each, "groups": tuple(each["groups"])}) for each in records)


@runtime_checkable
class PeerState(Protocol):
    """An engine whose state peers exchange, as `TorchFTState` does."""

    def join(self, reduce: Callable[[list[torch.Tensor], torch.Tensor], bool]) -> None:
        """Reduce gradients and loss with the groups of a run from now on."""

    def peer_state(self) -> dict[str, Any]:
        """Return this rank's state, for a peer."""

    def load_peer_state(self, state: Mapping[str, Any]) -> None:
        """Load what `peer_state` of the same rank of a peer returned."""


class GroupSyncs(Syncs):
    """Message of every committed step, which the group's reduction has brought. It takes the place of `StepSyncs`."""

    def __init__(self, group: ReplicaGroup) -> None:
        self.waits_for_losses = False
        self._group = group

    def step_done(self, step: int, *, loss: object, report: RankReport) -> StepSync:
        """Return the message of the step that has just committed."""
        reduced = self._group.reduced
        assert reduced is not None, "the step committed"
        return StepSync(step=step, losses=[reduced.loss], **asdict(reduced.report))

    def flush(self) -> list[StepSync]:
        """Return nothing: no message is in flight after a step."""
        return []


class ReplicaCheckpointing(Checkpointing):
    """Engine, history and checkpoints of one replica group."""

    def __init__(self, group: ReplicaGroup, *parts: Any) -> None:
        """`parts` are the arguments of `Checkpointing`."""
        super().__init__(*parts)
        self.ends = ""
        """How this group, or the peer that healed it, has ended: "end", "left" by the script, or empty while it trains."""
        self.history = StepHistory()
        self._group = group
        self._owns_head = False
        """True if the manager's head is the ledger's, as far as this group knows."""
        self._recorded: tuple[int, ...] = ()
        """Groups that the ledger has last, of this attempt. This group may have executed that step with other groups."""

    @property
    def step(self) -> int:
        """The last committed step."""
        return self._tracker.step

    def restore(self, engine: object, parts: Mapping[str, Any]) -> None:
        """Take the group's state, and load the resume point into it, unless a peer has a newer state. Then join the peers."""
        if isinstance(engine, PeerState) and self._group.rejoins:
            self._take_engine(adapt(engine, self._spec.checkpoint.engine, **parts))
        else:
            super().restore(engine, parts)
        self._generators = None  # each step has seeded its own before the script gets the batch
        if not isinstance(self.engine, PeerState):
            raise ScriptInvalid(
                f"expected run.restore(dlac_pipeline.TorchFTState(model=..., optimizer=...)) with launch.replicas, found "
                f"{type(self.engine).__name__}: wrap the state of the script in it"
            )
        self.engine.join(self._reduce)
        self._group.join(self)

    def peer_state(self) -> dict[str, Any]:
        """Return the state of this group, for a newcomer."""
        leaving = self._policy.leaving
        run = {
            "step": self.step,
            "execution": self._group.execution,
            "head_step": self._group.head_step,
            "ends": self.ends,
            "leaving": None if leaving is None else asdict(leaving),
        }
        return {"parts": self._engine_of_peers().peer_state(), "run": run, "history": self.history.to_records()}

    def load_peer_state(self, state: dict[str, Any]) -> None:
        """Load the state of a peer. The reader follows, because each batch is read by its step."""
        self._manager.gate.finish()
        self._engine_of_peers().load_peer_state(state["parts"])
        self.history.load(state["history"])
        self._tracker.step, self._tracker.cursors = state["run"]["step"], None
        self._group.execution, self._group.head_step = state["run"]["execution"], state["run"]["head_step"]
        self.ends, leaving = state["run"]["ends"], state["run"]["leaving"]
        self._policy.leaving = None
        if leaving is not None:
            self._policy.on_sync(replace(StepSync(**leaving), due=False))
        self._owns_head = False

    def committed(self) -> None:
        """Note the step that has just committed in the history, and forget steps that the committer has recorded."""
        reduced = self._group.reduced
        assert reduced is not None, "the step committed"
        self.history.add(self.step, reduced, applied=self.step not in self._tracker.skipped)
        self._group.head_step = max(self._group.head_step, reduced.head_step)
        self._policy.head_step = max(self._policy.head_step, self._group.head_step)
        self.history.forget(self._group.head_step)
        self._owns_head = self._owns_head and self._group.commits
        self._tracker.losses, self._tracker.skipped = [], []  # `take` sets those that its checkpoint records

    def due_reason(self) -> str | None:
        """Return the policy's reason for a checkpoint after the last committed step, or None."""
        try:
            return super().due_reason()
        except HeadMoved as err:
            self._lose_head(err)
            return self._policy.reason()

    def settle(self) -> None:
        """Wait for the checkpoint in progress, if one exists. Its rows are in the next one if another group was faster."""
        try:
            super().settle()
        except HeadMoved as err:
            self._lose_head(err)

    def take(self, reason: str, *, wait: bool = False) -> None:
        """Take a checkpoint after the last committed step, if this group is the committer. Repeat it after another group's."""
        if not self._group.commits:
            self._policy.taken()
            return
        done = False
        while not done:
            try:
                self._take(reason, wait=wait)
                done = True
            except HeadMoved as err:
                self._lose_head(err)

    def _reduce(self, gradients: list[torch.Tensor], loss: torch.Tensor) -> bool:
        """Reduce with the groups present, and be no hung rank if another one is."""
        self._heartbeat.doing(Phase.WAITING, self.step)
        commits = self._group.reduce(gradients, loss)
        self._heartbeat.doing(Phase.TRAINING, self.step)
        return commits

    def _take(self, reason: str, *, wait: bool) -> None:
        self.settle()  # the ranks of the group know the same head then
        if not self._owns_head:
            self._take_over()
        tracker = self._tracker
        is_recorded = tracker.step <= tracker.committed_step  # by a dead group
        if is_recorded and not self._attempt.has_unrecorded_leg:
            self.settle()
            self._policy.taken()
            return
        tracker.losses = self.history.losses(tracker.committed_step)
        tracker.skipped = self.history.skipped(tracker.committed_step)
        tracker.memberships = list(self.history.memberships(tracker.committed_step, self._recorded))
        if tracker.memberships:
            self._recorded = tracker.memberships[-1][1]
        super().take(reason, wait=wait)

    def _take_over(self) -> None:
        """Continue after the ledger's head, which another group may have committed. The first rank of the group reads it."""
        attempt, found = self._attempt, b""
        if self._communicator.rank == 0:
            ledger = Ledger(attempt.plans.lakehouse)
            rows: list[LedgerRow] = ledger.patiently(
                lambda: ledger.rows(attempt.name.run, kinds=(*HEAD_KINDS, MembershipRow))
            )
            head = fence_of_rows(rows).head
            is_new = attempt.point.leg_is_new and (head is None or leg_of(rows, head).index != attempt.leg.index)
            step = attempt.point.step if head is None else checkpoint_rows(rows)[head].step
            memberships = [row for row in rows if isinstance(row, MembershipRow) and row.attempt == attempt.name.number]
            last = max(memberships, key=lambda row: row.first_step, default=None)
            found = json.dumps([head, is_new, step, [] if last is None else list(last.groups)]).encode()
        head, is_new, step, recorded = json.loads(self._communicator.tree.broadcast(found))
        self._manager.continue_after(head, leg_is_new=is_new)
        self._tracker.committed_step = self._group.head_step = step
        self._owns_head, self._recorded = True, tuple(recorded)

    def _report(self, committed: Committed | None) -> None:
        super()._report(committed)
        if committed is not None:
            self._group.head_step = committed.step

    def _lose_head(self, err: HeadMoved) -> None:
        _log.info("another replica group committed a checkpoint: %s", err)
        self._owns_head = False
        self._tracker.committed_step = self._group.head_step

    def _engine_of_peers(self) -> PeerState:
        assert isinstance(self.engine, PeerState), "checked when it was restored"
        return self.engine
