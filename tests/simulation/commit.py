"""Durable checkpoints of both engines: upload by every rank, vote, and commit by the leader."""

from __future__ import annotations

from dataclasses import dataclass

from tests.simulation.ledger import Reading, Refused, extend
from tests.simulation.scheduler import Life, Process
from tests.simulation.values import CheckpointRow, ClaimRow, FinishRow, State, rows_of
from tests.simulation.world import Files, Node, World

_VOTES = 12
"""Times that the leader looks for votes before the checkpoint fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A staged state of an attempt, to be committed by the leader."""

    attempt: int
    nonce: int
    leg: int
    quorum: int
    state: State
    parent: int
    """The head as the leader knows it."""

    @classmethod
    def of(cls, claim: ClaimRow, state: State, parent: int, *, quorum: int = 0) -> Stage:
        """Return a state that the attempt of a claim has staged."""
        fence = claim.fence
        return cls(attempt=fence.attempt, nonce=fence.nonce, leg=claim.leg, quorum=quorum, state=state, parent=parent)


def commit_checkpoint(world: World, node: Node, stage: Stage, ranks: list[Life]) -> Process[Reading]:
    """Upload and commit. Raise `Refused` or `OutcomeUnknown`, also for a checkpoint without the votes of all ranks."""
    checkpoint = world.number()
    files = world.files[checkpoint] = Files(stage.state, len(ranks))
    for rank, life in enumerate(ranks):
        world.scheduler.spawn(world.upload(checkpoint, rank), life)
    looks = 0
    while not world.rules.have_all_voted(files.whole, files.ranks):
        yield 0.4
        looks += not world.store_away
        if looks == _VOTES:
            raise Refused("have_all_voted", world.ledger.read())
    if world.happens(world.conditions.pause):
        yield world.between(5.0, 30.0)

    def decide(reading: Reading) -> CheckpointRow:
        check_owner(world, reading, stage.attempt, stage.nonce)
        later = [members for _, _, members in reading.quorums(stage.nonce, after=stage.quorum)]
        if not world.rules.stays_member(node.number, later):
            raise Refused("stays_member", reading)
        if not world.rules.extends_head(reading.fence, stage.parent):
            raise Refused("extends_head", reading)
        parent_step = reading.checkpoint(stage.parent).state.step
        return CheckpointRow(
            fence=extend(reading.fence, head=checkpoint),
            append_id=checkpoint,
            checkpoint=checkpoint,
            parent=stage.parent,
            nonce=stage.nonce,
            quorum=stage.quorum,
            state=stage.state,
            named=tuple(
                (step, rows_of(stage.leg, step))
                for step in range(1, stage.state.step + 1)
                if world.rules.follows_parent(step, parent_step)
            ),
        )

    return (yield from world.ledger.append(node, checkpoint, decide))


def finish_run(world: World, node: Node, attempt: int, nonce: int) -> Process[Reading]:
    """Record the end of the run. Raise `Refused` or `OutcomeUnknown`."""
    append_id = world.number()

    def decide(reading: Reading) -> FinishRow:
        check_owner(world, reading, attempt, nonce)
        return FinishRow(fence=extend(reading.fence), append_id=append_id)

    return (yield from world.ledger.append(node, append_id, decide))


def check_owner(world: World, reading: Reading, attempt: int, nonce: int) -> None:
    """Raise `Refused` if the run is finished, or another attempt owns it."""
    if not world.rules.owns_run(reading.fence, attempt, nonce) or reading.finished:
        raise Refused("owns_run", reading)
