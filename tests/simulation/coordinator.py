"""The coordinator claims the run, chooses a copy in memory or a checkpoint, and starts an attempt. The operator rewinds."""

from collections.abc import Callable

from tests.simulation.commit import check_owner
from tests.simulation.ledger import OutcomeUnknown, Reading, Refused, extend
from tests.simulation.scheduler import Process
from tests.simulation.values import ClaimRow, Fence, Part, QuarantineRow, RewindRow, Stamp, State
from tests.simulation.world import PATIENCE, Node, World

_CLAIMS = 3
"""Claims of one launch. The first found a copy that was lost before it was loaded."""
Start = Callable[[ClaimRow, Reading, State, list[Node]], None]
"""Starts an attempt of an engine: its claim, the ledger, its state, and its nodes."""


def watch(world: World, node: Node, start: Start) -> Process[None]:
    """Launch the run from a node whenever nothing trains within its reach."""
    while not world.ledger.finished:
        yield world.between(1.0, 4.0)
        near = world.reached_from(node)
        lively = any(other.trains and world.now - other.progress < PATIENCE for other in near)
        joins = node.group is not None and world.now - node.progress < PATIENCE
        if not lively and not joins:
            world.scheduler.spawn(launch(world, node, near, start), node.life)


def launch(world: World, leader: Node, team: list[Node], start: Start) -> Process[None]:
    """Claim the run from `leader`, and start an attempt on the nodes of `team`."""
    world.note("{} launches on {}", leader.name, [node.number for node in team])
    lives = [node.restart_ranks() for node in team]
    for node in team:
        node.trains = True
    world.advance(team)
    try:
        reading = yield from world.ledger.look(leader)
        leg = reading.legs + 1 if world.happens(world.conditions.new_leg) else reading.leg
        replaced = reading.fence.attempt
        if world.happens(world.conditions.pause):
            yield world.between(5.0, 40.0)
        for _ in range(_CLAIMS):
            yield world.between(0.1, 0.5)
            claim, reading = yield from _claim(world, leader, team, replaced, leg)
            world.advance(team)
            reading, state = yield from _resume(world, leader, claim, reading)
            if state is not None:
                break
            replaced = claim.fence.attempt
        else:
            raise OutcomeUnknown
    except (Refused, OutcomeUnknown) as err:
        world.note("{} steps aside: {}", leader.name, err)
        for node, life in zip(team, lives, strict=True):
            if node.ranks is life:
                node.trains = False
        return
    mine = [node for node, life in zip(team, lives, strict=True) if node.ranks is life and world.linked(leader, node)]
    world.truth.start(reading, claim, state)
    world.note("attempt {} starts from {} on {}", claim.fence.attempt, state, [node.number for node in mine])
    world.advance(mine)
    for node in mine:
        world.drop_copies(node, claim)
    start(claim, reading, state, mine)


def _claim(world: World, leader: Node, team: list[Node], replaced: int, leg: int) -> Process[tuple[ClaimRow, Reading]]:
    nonce = world.number()
    parts = world.parts_reached(leader)
    world.truth.look(nonce)

    def decide(reading: Reading) -> ClaimRow:
        if not world.rules.is_unfinished(reading.finished):
            raise Refused("is_unfinished", reading)
        if not world.rules.replaces_current(reading.fence, replaced):
            raise Refused("replaces_current", reading)
        fence = reading.fence
        return ClaimRow(
            fence=Fence(fence.attempt + 1, nonce, fence.seq + 1, fence.head),
            append_id=nonce,
            replaces=replaced,
            leg=leg,
            memory=choose_copy(world, reading, parts, leg),
            members=tuple(node.number for node in team),
        )

    reading = yield from world.ledger.append(leader, nonce, decide)
    claim = reading.claim(nonce)
    assert claim is not None, "the append has landed"
    check_owner(world, reading, claim.fence.attempt, nonce)
    return claim, reading


def choose_copy(world: World, reading: Reading, parts: list[Part], leg: int) -> Stamp | None:
    """Return the newest copy in memory that an attempt of `leg` may train from, or None."""
    rules, head = world.rules, reading.head
    for stamp in sorted({part.stamp for part in parts}, reverse=True):
        claim = reading.claim(stamp.nonce)
        claim_seq = reading.fence.seq if claim is None else claim.fence.seq
        if (
            rules.is_claimed(claim)
            and rules.is_unrewound(claim_seq, reading.rewind_seq)
            and rules.continues_head(stamp, reading.base(stamp.nonce), head.checkpoint, head.nonce, head.quorum)
            and rules.is_at_head(stamp.step, head.state.step)
            and rules.is_same_leg(stamp.leg, leg)
            and world.assemble(parts, stamp) is not None
        ):
            return stamp
    return None


def _resume(world: World, leader: Node, claim: ClaimRow, reading: Reading) -> Process[tuple[Reading, State | None]]:
    """Return the ledger and the state to train from, or None if the claimed copy is lost."""
    world.reach("load")
    if claim.memory is not None:
        yield world.between(0.2, 1.0)
        return reading, world.assemble(world.parts_reached(leader), claim.memory)
    damaged: list[int] = []
    for row in reading.lineage(reading.fence.head):
        answer = yield from _verify(world, row.checkpoint)
        if answer == "whole":
            state = world.load(row.checkpoint, row.state)  # what was verified, even if the files are damaged later
            if damaged:
                reading = yield from _quarantine(world, leader, claim, damaged, row.checkpoint)
            return reading, state
        damaged.append(row.checkpoint)
    raise AssertionError("the initial checkpoint is always whole")


def _verify(world: World, checkpoint: int) -> Process[str]:
    """Wait for the store, and return whether a checkpoint is `whole` or `damaged`."""
    while True:
        yield world.between(0.3, 1.5)
        answer = world.verify(checkpoint)
        if world.rules.is_intact(answer):
            return "whole"
        if world.rules.is_damage(answer):
            return "damaged"


def _quarantine(world: World, leader: Node, claim: ClaimRow, damaged: list[int], head: int) -> Process[Reading]:
    append_id = world.number()

    def decide(reading: Reading) -> QuarantineRow:
        check_owner(world, reading, claim.fence.attempt, claim.fence.nonce)
        return QuarantineRow(fence=extend(reading.fence, head=head), append_id=append_id, damaged=tuple(damaged))

    return (yield from world.ledger.append(leader, append_id, decide))


def rewind(world: World, node: Node) -> Process[None]:
    """Return to some earlier checkpoint, as an operator does, often with rows excluded: a new leg."""
    nonce, excludes = world.number(), world.rng.random() < 0.5
    try:
        reading = yield from world.ledger.look(node)
        target = world.rng.choice(reading.checkpoints()).checkpoint
        yield world.between(0.0, 3.0)

        def decide(reading: Reading) -> RewindRow:
            if not world.rules.is_unfinished(reading.finished):
                raise Refused("is_unfinished", reading)
            if not world.rules.is_restorable(target, reading.quarantined):
                raise Refused("is_restorable", reading)
            fence = reading.fence
            return RewindRow(
                fence=Fence(fence.attempt + 1, nonce, fence.seq + 1, target),
                append_id=nonce,
                replaces=fence.attempt,
                leg=reading.legs + 1 if excludes else reading.leg,
            )

        yield from world.ledger.append(node, nonce, decide)
    except (Refused, OutcomeUnknown) as err:
        world.note("the rewind is refused: {}", err)
