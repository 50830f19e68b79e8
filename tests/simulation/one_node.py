"""The engine per step as it is built (note 0029): groups of one node, whose quorums are no rows, may do a step twice."""

from dataclasses import dataclass

from tests.simulation.commit import Stage, commit_checkpoint, finish_run
from tests.simulation.ledger import OutcomeUnknown, Reading, Refused
from tests.simulation.scheduler import Life, Process
from tests.simulation.values import BEGINNING, LAST_STEP, CheckpointRow, ClaimRow, State, digest_rows, rows_of
from tests.simulation.world import Node, World, share_of

_RANKS = 2
"""Ranks of a group."""
_NO_STATE = -1


@dataclass(eq=False)
class Group:
    """A replica group. Without a state it has just been started, or has done its last step without its peers."""

    number: int
    life: Life
    state: State | None = None
    execution: int = 0
    """The quorum in which its last step was done, or 0 at first."""
    head: CheckpointRow = BEGINNING
    """The head as it knows it."""
    commits: bool = False
    silent_until: float = 0.0

    @property
    def step(self) -> int:
        """Return the step that it reports. Any group with a state is ahead of one without."""
        return _NO_STATE if self.state is None else self.state.step


class OneNode:
    """An attempt of replica groups on one node."""

    def __init__(self, world: World, claim: ClaimRow, reading: Reading, state: State, node: Node) -> None:
        self._world, self._claim, self._node, self._life = world, claim, node, node.ranks
        self._groups = node.replicas = [
            Group(number, Life(node.ranks), state, head=reading.head)
            for number in range(world.rng.choice((2, 3, 3, 4)))
        ]

    def supervise(self) -> Process[None]:
        """Start dead groups again, while another one has the state."""
        while True:
            yield self._world.between(0.2, 0.8)
            if all(group.life.ended or group.state is None for group in self._groups):
                self._end("no group has the state")
                return
            self._world.advance([self._node])
            self._groups[:] = [
                Group(group.number, Life(self._life)) if group.life.ended else group for group in self._groups
            ]

    def train(self) -> Process[None]:
        """Form quorums, and execute a step in each."""
        world = self._world
        while True:
            yield world.between(0.5, 1.0)
            if not world.lighthouses:  # the supervisor starts another one
                continue
            world.reach("forward")
            members = [group for group in self._groups if self._is_present(group) and not world.happens(0.15)]
            if any(group.state is not None for group in members) and (yield from self._have_healed(members)):
                if members[0].step == LAST_STEP:
                    self._commit_if_due(members[0])
                else:
                    yield from self._execute(members)

    def _is_present(self, group: Group) -> bool:
        return not group.life.ended and group.silent_until <= self._world.now

    def _have_healed(self, members: list[Group]) -> Process[bool]:
        """Let each member get the newest state. Return whether all have done their last step together."""
        world, rules = self._world, self._world.rules
        donor = max(members, key=lambda group: group.step)
        for group in [each for each in members if not rules.has_newest(each.step, donor.step)]:
            yield world.between(0.1, 0.6)
            world.reach("heal")
            if donor.life.ended or group.life.ended:
                return False
            group.state, group.execution, group.head = donor.state, donor.execution, donor.head
        strangers = [each for each in members if not rules.is_same_execution(each.execution, members[0].execution)]
        for group in strangers:
            group.state = None
        return not strangers

    def _execute(self, members: list[Group]) -> Process[None]:
        """Execute one step. Each group learns for itself whether its collective operation succeeded."""
        world, quorum = self._world, self._world.number()
        yield world.between(0.05, 0.3)
        world.reach("reduce")
        present = [group for group in members if not group.life.ended]
        if not present or not world.rules.have_all_contributed(present, members):
            world.note("the groups {} drop a step", [group.number for group in members])
            return
        result = self._reduce(present, members)
        applied: set[State] = set()
        for group in world.rng.sample(present, len(present)):
            yield world.between(0.0, 0.1)
            if group.life.ended:
                continue
            is_disturbed = not all(map(self._is_present, members))
            votes = [not (world.rng.random() < 0.5 if is_disturbed else world.happens(0.02)) for _ in range(_RANKS)]
            if world.rules.have_ranks_voted(votes):
                group.state, group.execution = result if all(votes) else world.garbage(result.step), quorum
                applied.add(group.state)
                if group is members[0]:
                    self._commit_if_due(group)
                world.reach("apply")
        if applied:
            world.truth.check_applied(self._claim.fence.nonce, applied, by_all=False)

    def _reduce(self, present: list[Group], members: list[Group]) -> State:
        """Return the state after a step that divides the global batch among the groups."""
        before, step = present[0].state, max(group.step for group in present) + 1
        if before is None or any(group.state != before for group in present):
            return self._world.garbage(step)
        rows = rows_of(self._claim.leg, step)
        shares = (share_of(rows, members.index(group), len(members)) for group in present)
        consumed = sorted(row for share in shares for row in share)
        return self._world.truth.make(before, digest_rows(before.rows, consumed), self._claim.fence.nonce)

    def _commit_if_due(self, group: Group) -> None:
        """Let the first group of a quorum commit a checkpoint."""
        world, state = self._world, group.state
        due = min(group.head.state.step + world.conditions.interval, LAST_STEP)
        if state is not None and not group.commits and state.step >= due:
            group.commits = True
            world.scheduler.spawn(self._checkpoint(group, state), group.life)

    def _checkpoint(self, group: Group, state: State) -> Process[None]:
        """Commit a state, unless another group has committed its step. An error of the catalog or the store ends the attempt."""
        world, fence, is_due = self._world, self._claim.fence, group.head.state.step < LAST_STEP
        try:
            while is_due:
                stage = Stage.of(self._claim, state, group.head.checkpoint)
                try:
                    reading, is_due = (
                        (yield from commit_checkpoint(world, self._node, stage, [group.life] * _RANKS)),
                        False,
                    )
                except Refused as refused:
                    if refused.rule != "extends_head":
                        raise
                    reading = refused.reading
                    is_due = world.rules.is_beyond_head(state.step, reading.head.state.step)
                group.head = reading.head
            if group.head.state.step == LAST_STEP:
                yield from finish_run(world, self._node, fence.attempt, fence.nonce)
        except (Refused, OutcomeUnknown) as err:
            self._end(f"the commit fails: {err}")
        group.commits = False

    def _end(self, why: str) -> None:
        """End all groups."""
        self._world.note("attempt {} ends: {}", self._claim.fence.attempt, why)
        if self._node.ranks is self._life and not self._life.ended:
            self._node.restart_ranks()
        self._life.ended = True


def start_attempt(world: World, claim: ClaimRow, reading: Reading, state: State, team: list[Node]) -> None:
    """Start an attempt on the first node of a launch. The others stay free."""
    for node in team[1:]:
        node.trains = False
    for node in team[:1]:
        attempt = OneNode(world, claim, reading, state, node)
        for process in (attempt.supervise(), attempt.train()):
            world.scheduler.spawn(process, node.ranks)
