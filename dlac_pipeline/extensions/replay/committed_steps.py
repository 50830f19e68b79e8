"""Committed steps of a run: the checkpoint, the leg and the nodes of each, and the reader state before it, by the ledger."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dlac_pipeline.checkpoint.restore.resume_point import resume_point_of
from dlac_pipeline.extensions.replay.loss_spikes import recorded_losses
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, claim_of, fence_of_rows, lineage_of, trained_by
from dlac_pipeline.lakehouse.ledger.typed_rows import (
    AdvanceRow,
    CheckpointRow,
    ClaimRow,
    ForkRow,
    LedgerRow,
    MembershipRow,
)
from dlac_pipeline.plan.legs.committed_leg import leg_of, replays_of
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.supervise.claims import launch_folders_of, spec_of_attempt, trained_attempts
from dlac_pipeline.supervise.liveness.heartbeat import read_heartbeats


@dataclass(frozen=True, kw_only=True, slots=True)
class CommittedStep:
    """A committed step, the leg that it belongs to, and the checkpoints around it."""

    step: int
    leg: Leg
    checkpoint: CheckpointRow
    """The first checkpoint of the surviving lineage that includes the step."""
    parent: CheckpointRow | None
    readers: Sequence[Sequence[int]]
    """The ranks of each reader that trained the step, in the order of the slots. Those of absent process groups are missing."""
    nodes: Sequence[str]
    """Node of the first rank of each reader. Empty: the ledger does not have them."""


class CommittedSteps:
    """The committed steps of one run. Its ledger rows are read once."""

    def __init__(self, lakehouse: Lakehouse, run: str) -> None:
        """Raise NoSuchRun if the ledger has no row of the run."""
        self._ledger = Ledger(lakehouse)
        self._run = run
        self.rows = self._ledger.head_rows(run)
        self._checkpoints = checkpoint_rows(self.rows)
        self.lineage = [self._checkpoints[each] for each in lineage_of(self.rows, fence_of_rows(self.rows).head)]
        """The surviving checkpoints, newest first."""

    @property
    def last(self) -> int:
        """The last committed step."""
        return self.lineage[0].step if self.lineage else 0

    def find(self, step: int) -> CommittedStep:
        """Return a step of the surviving lineage. Raise `SpecInvalid` if the run has not trained or not committed it."""
        covering = [each for each in self.lineage if each.step >= step]
        if not covering or step < 1:
            known = f"1 to {self.last}" if self.last else "of which it has none yet"
            raise SpecInvalid(
                f"expected a committed step of run {self._run!r}, {known}, found {step}: name another step"
            )
        checkpoint = covering[-1]
        parent = self._checkpoints.get(checkpoint.parent or "")
        if parent is None:
            self._check_trained(checkpoint, step)
        return self._as_trained(step, leg_of(self.rows, checkpoint.checkpoint_id), checkpoint, parent)

    def _as_trained(
        self, step: int, leg: Leg, checkpoint: CheckpointRow, parent: CheckpointRow | None
    ) -> CommittedStep:
        """Return a step with the ranks and nodes of the attempt that trained it."""
        nodes = self._nodes_of(checkpoint.attempt)
        trained = trained_by(self.rows, checkpoint.attempt, step)
        if trained != checkpoint.attempt:  # a later attempt resumed from its memory
            before = next(row for row in self.rows if isinstance(row, ClaimRow) and row.memory_of == trained)
            checkpoint = replace(
                checkpoint,
                attempt=trained,  # its job spec has the mesh
                world_size=before.memory_ranks,
                readers=before.memory_readers,
                stages=before.memory_stages,
            )
            claim = claim_of(self.rows, trained)
            nodes = self._nodes_of(trained) if claim.rendezvous else [claim.host] * before.memory_ranks
        readers = self._readers_of(checkpoint, step)
        if len(nodes) != sum(map(len, readers)):  # they are those of the process group that took the checkpoint
            nodes = []
        node_of = dict(zip(sorted(rank for mine in readers for rank in mine), nodes, strict=False))
        firsts = [node_of[mine[0]] for mine in readers] if nodes else []
        return CommittedStep(step=step, leg=leg, checkpoint=checkpoint, parent=parent, readers=readers, nodes=firsts)

    def _readers_of(self, checkpoint: CheckpointRow, step: int) -> list[list[int]]:
        """Return the ranks of each reader that trained a step: of several process groups, those that were present."""
        size, lineage = checkpoint.world_size, {each.checkpoint_id for each in self.lineage}
        known = [
            row
            for row in self.rows
            if isinstance(row, MembershipRow)
            and (row.attempt, row.first_step <= step, row.checkpoint_id in lineage) == (checkpoint.attempt, True, True)
        ]
        last = max(known, key=lambda row: row.first_step, default=None)
        groups = [0] if last is None else last.groups
        stages = checkpoint.stages or 1
        of_stage = size // stages
        each = of_stage // (checkpoint.readers or of_stage)
        return [
            [group * size + stage * of_stage + rank for stage in range(stages) for rank in range(first, first + each)]
            for group in groups
            for first in range(0, of_stage, each)
        ]

    def original(self, found: CommittedStep, order: LegOrder) -> int:
        """Return the step of the order whose rows a step has: another one if the step replayed it. Raises as `find`."""
        known = found.checkpoint if found.checkpoint.checkpoint_id or found.parent is None else found.parent
        replays = replays_of(found.leg, order, self._ledger, self.rows, known.checkpoint_id)
        if replays is None:
            return found.step
        if found.step > replays.total_steps:
            raise SpecInvalid(
                f"expected a committed step of run {self._run!r}, 1 to {self.last}, found {found.step}, a replay of which no "
                "checkpoint knows the step: name another step"
            )
        return replays.original(found.step)

    def losses(self) -> dict[int, float]:
        """Return the loss of each applied step of the surviving lineage."""
        return recorded_losses(self._ledger, self.rows, self.lineage[0].checkpoint_id if self.lineage else None)

    def find_trained(self, step: int) -> CommittedStep:
        """Return a committed step, or a later one that the last attempt trained and lost, by its launch folder.

        Its `checkpoint` is then one that the ledger does not have. Raises as `find`.
        """
        head, attempt = self.lineage[0] if self.lineage else None, max(trained_attempts(self.rows), default=0)
        head_id = None if head is None else head.checkpoint_id
        for folder in launch_folders_of(self.rows, attempt) if step > self.last else ():
            resumed = folder / "resume.json"
            point = resume_point_of(json.loads(resumed.read_text())) if resumed.exists() else None
            if (
                point is None
                or step > max((each.step for each in read_heartbeats(folder)), default=0)
                or (head_id != point.checkpoint_id and (head is None or head.attempt != attempt))
            ):
                continue
            ranks, readers, stages = ranks_of_attempt(self._ledger.lakehouse, self.rows, self._run, attempt)
            checkpoint = CheckpointRow(
                attempt=attempt, step=step, world_size=ranks, readers=readers, stages=stages, parent=head_id
            )
            return self._as_trained(step, Leg.from_json(point.leg), checkpoint, head)
        return self.find(step)

    @property
    def begins_itself(self) -> bool:
        """True if the run began without a checkpoint of another one."""
        adopted = bool(self.lineage) and self.lineage[-1].adopted is not None
        return not adopted and not any(isinstance(each, ForkRow) for each in self.rows)

    def _check_trained(self, first: CheckpointRow, step: int) -> None:
        """Check that the run itself trained the steps of its first checkpoint."""
        fork = next((each for each in self.rows if isinstance(each, ForkRow)), None)
        if fork is None and first.adopted is None:
            return
        adopted = f"adopted from {first.adopted!r}, with"
        origin = f"forked from run {fork.parent_run!r}, which trained" if fork else adopted
        raise SpecInvalid(
            f"expected a step that run {self._run!r} trained, {first.step + 1} or later, found {step}: its first checkpoint "
            f"was {origin} that step"
        )

    def state_before(self, found: CommittedStep) -> tuple[ReaderState, int]:
        """Return the cursors after the last checkpoint before a step of a streamed leg, and the step of that checkpoint.

        They are where the advances of the leg until then ended, or those with which the leg begins.
        """
        leg, parent = found.leg, found.parent
        state = start_of(leg)
        if parent is None or parent.step <= leg.start_step:
            return state, leg.start_step
        lineage = set(lineage_of(self.rows, parent.checkpoint_id))
        for row in self._ledger.rows(self._run, kinds=(AdvanceRow,)):
            if row.checkpoint_id in lineage and row.leg == leg.index:
                groups = state[row.source]
                groups[row.key_group] = max(groups[row.key_group], _cursor_after(row))
        return state, parent.step

    def _nodes_of(self, attempt: int) -> list[str]:
        """Return the node of each rank of an attempt. Empty: the ledger does not have them."""
        known = (each for each in self._checkpoints.values() if each.attempt == attempt and each.rank_nodes)
        first = next(known, None)
        return [each.node for each in first.rank_nodes for _ in range(each.ranks)] if first else []


def start_of(leg: Leg) -> ReaderState:
    """Return the cursors with which a leg begins."""
    return [list(source.start.cursors) for source in leg.sources]


def _cursor_after(row: AdvanceRow) -> Cursor:
    if row.token_end is None:
        return Cursor(row.pass_index, row.block, row.position_end)
    return Cursor(row.pass_index, row.block, row.position_end - 1, row.token_end)


def ranks_of_attempt(lakehouse: Lakehouse, rows: Sequence[LedgerRow], run: str, attempt: int) -> tuple[int, int, int]:
    """Return the ranks of an attempt, their shares and their stages, by its job spec. Raises as `spec_of_attempt`."""
    launch = spec_of_attempt(lakehouse, rows, run, attempt).launch
    return launch.world_size, launch.mesh.readers(launch.world_size), launch.mesh.pp
