"""One seed, one schedule: run it, check it, and return what happened."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tests.simulation.faults import Faults, start_watching
from tests.simulation.invariants import Truth, Violation, check
from tests.simulation.ledger import Ledger, Reading
from tests.simulation.rounds import start_attempt
from tests.simulation.rules import Rules
from tests.simulation.scheduler import Life
from tests.simulation.steps import Groups
from tests.simulation.values import ClaimRow, State
from tests.simulation.world import Node, World

_LIMIT = 400.0
"""Time by which every run has finished."""
_LATE = 30.0
"""Time after the end in which late requests still land."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    violation: str | None
    events: list[str]
    claims: int
    from_memory: int
    """Claims that resumed from a copy in memory."""
    quorums: int
    replayed: Counter[int]
    """Steps executed again -> single faults."""

    def __str__(self) -> str:
        """Return the events and the violation, for a person."""
        return "\n".join([f"seed {self.seed}", *self.events, f"violation: {self.violation}"])


def simulate(seed: int, rules: type[Rules] = Rules) -> Outcome:
    """Run the schedule of one seed."""
    world = World(seed, rules)
    world.ledger, world.truth = Ledger(world), Truth(world)
    world.note("{}", world.conditions)

    def start_rounds(claim: ClaimRow, reading: Reading, state: State, team: list[Node]) -> None:
        start_attempt(world, claim, reading, state, team)

    groups = Groups(world)
    per_step = world.conditions.per_step
    start = groups.start_attempt if per_step else start_rounds
    if per_step:
        world.scheduler.spawn(groups.watch(), Life())
    start_watching(world, start)
    Faults(world, start).schedule()
    violation = None
    try:
        world.scheduler.run(_LIMIT, lambda: world.ledger.finished)
        check(world.ledger.finished, "the run does not finish")
        world.scheduler.run(world.now + _LATE, lambda: False)
    except Violation as err:
        violation = str(err)
    claims = [row for row in world.ledger.rows if isinstance(row, ClaimRow)]
    return Outcome(
        seed=seed,
        violation=violation,
        events=world.scheduler.events() if violation else [],
        claims=len(claims),
        from_memory=sum(row.memory is not None for row in claims),
        quorums=len(world.ledger.rows) - len(claims),
        replayed=world.truth.replayed,
    )
