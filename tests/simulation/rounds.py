"""The engine of rounds: all ranks are one process group. The failure of one ends the attempt, and the run is claimed again."""

from dataclasses import replace

from tests.simulation.commit import Stage, commit_checkpoint, finish_run
from tests.simulation.ledger import OutcomeUnknown, Reading, Refused
from tests.simulation.scheduler import Life, Process
from tests.simulation.values import BATCH, LAST_STEP, ClaimRow, Part, Stamp, State, digest_rows, rows_of
from tests.simulation.world import Node, World

_SLOTS = 3
"""Copies that a rank keeps at the most: one that is whole everywhere, and two on their way."""


class Attempt:
    """An attempt of one process group, whose first rank leads."""

    def __init__(self, world: World, claim: ClaimRow, reading: Reading, state: State, team: list[Node]) -> None:
        self._world, self._claim, self._state, self._team = world, claim, state, team
        size = next(size for size in range(len(team), 0, -1) if BATCH % size == 0)
        self._ranks = [(node, node.ranks) for node in team[:size]]
        for node in team[size:]:
            node.trains = False
        self._head = reading.head
        self._commits = False
        self._ended = False
        self._arrived: dict[int, set[int]] = {}
        """Step of a copy -> parts of it that are whole at their buddies."""
        self._whole_step = 0
        """Newest step that is whole at all ranks and buddies, as their last collective operation found."""

    def train(self) -> Process[None]:
        """Execute steps until a rank is lost."""
        world = self._world
        while not self._ended:
            yield world.between(0.7, 1.3)
            world.reach("forward")
            if not all(not life.ended and world.linked(self._ranks[0][0], node) for node, life in self._ranks):
                slow = world.happens(0.2)
                yield world.between(5.0, 20.0) if slow else world.between(0.3, 2.0)
                self._end("a rank is lost")
                return
            world.advance([node for node, _ in self._ranks])
            if self._state.step < LAST_STEP:
                self._execute()
            due = min(self._head.state.step + world.conditions.interval, LAST_STEP)
            if self._state.step >= due and not self._commits:
                self._commits = True
                world.scheduler.spawn(self._checkpoint(self._state), self._ranks[0][1])

    def _execute(self) -> None:
        before, nonce = self._state, self._claim.fence.nonce
        rows = digest_rows(before.rows, rows_of(self._claim.leg, before.step + 1))
        self._state = self._world.truth.make(before, rows, nonce)
        whole = [step for step, parts in self._arrived.items() if len(parts) == len(self._ranks)]
        self._whole_step = max(whole, default=0)
        if sum(step >= self._whole_step for step in self._arrived) < _SLOTS:
            self._arrived[self._state.step] = set()
            for index, (node, life) in enumerate(self._ranks):
                self._world.scheduler.spawn(self._stage(node, index, self._state), life)

    def _stage(self, node: Node, index: int, state: State) -> Process[None]:
        """Copy one rank's part, and let the agent of its node send it to a buddy."""
        fence, world = self._claim.fence, self._world
        part = Part(Stamp(state.step, fence.attempt, 0, fence.nonce, self._claim.leg, len(self._ranks)), index, state)
        yield from world.copy(node, part, self._whole_step)
        world.scheduler.spawn(self._send(node, part, self._whole_step), node.life)

    def _send(self, node: Node, part: Part, whole_step: int) -> Process[None]:
        world = self._world
        while len(self._team) > 1 and not self._ended:
            yield world.between(0.05, world.conditions.send) if not world.over else 0.1
            at = self._team.index(node)
            buddy = next((each for each in self._team[at + 1 :] + self._team[:at] if world.linked(node, each)), None)
            if buddy is None:
                continue
            torn = world.happens(world.conditions.torn)
            world.hold(buddy, replace(part, digest_holds=not torn), whole_step)
            if not torn:
                break
        self._arrived[part.stamp.step].add(part.index)

    def _checkpoint(self, state: State) -> Process[None]:
        world, fence, leader = self._world, self._claim.fence, self._ranks[0][0]
        stage = Stage.of(self._claim, state, self._head.checkpoint)
        try:
            reading = yield from commit_checkpoint(world, leader, stage, [life for _, life in self._ranks])
            self._head = reading.head
            if state.step == LAST_STEP:
                yield from finish_run(world, leader, fence.attempt, fence.nonce)
                self._end("the run is finished")
        except (Refused, OutcomeUnknown) as err:
            self._end(f"the commit fails: {err}")
        self._commits = False
        if len(world.reached_from(leader)) > len(self._ranks) and world.happens(0.3):
            self._end("more nodes wait")

    def _end(self, why: str) -> None:
        """End all ranks. The agents and their copies stay."""
        self._world.note("attempt {} ends at step {}: {}", self._claim.fence.attempt, self._state.step, why)
        self._ended = True
        for node, life in self._ranks:
            if node.ranks is life and not life.ended:
                node.restart_ranks()
            life.ended = True


def start_attempt(world: World, claim: ClaimRow, reading: Reading, state: State, team: list[Node]) -> None:
    """Start an attempt on the nodes of a launch."""
    if team:
        world.scheduler.spawn(Attempt(world, claim, reading, state, team).train(), Life())
