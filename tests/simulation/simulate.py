"""The schedule of one seed: run it, and check its invariants."""

from collections import Counter
from dataclasses import dataclass
from functools import partial

from tests.simulation import one_node, rounds
from tests.simulation.coordinator import Start
from tests.simulation.faults import Faults
from tests.simulation.invariants import Truth, Violation, check
from tests.simulation.ledger import Ledger
from tests.simulation.rules import Rules
from tests.simulation.scheduler import Life, Scheduler
from tests.simulation.steps import Groups
from tests.simulation.values import ClaimRow
from tests.simulation.world import ONE_NODE, QUORUMS, ROUNDS, World

_LIMIT = 400.0
"""Time by which every run has finished."""
_LATE = 30.0
"""Time after the end in which late requests still land."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The result of one seed."""

    seed: int
    violation: str | None
    scheduler: Scheduler
    claims: list[ClaimRow]
    replayed: Counter[int]
    """Steps executed again -> single faults."""

    def __str__(self) -> str:
        """Return the events and the violation, for a person."""
        return "\n".join([f"seed {self.seed}", *self.scheduler.events(), f"violation: {self.violation}"])


def simulate(seed: int, rules: type[Rules] = Rules) -> Outcome:
    """Run the schedule of one seed."""
    world = World(seed, rules)
    world.ledger, world.truth = Ledger(world), Truth(world)
    world.note("{}", world.conditions)
    groups = Groups(world)
    starts: dict[str, Start] = {
        ROUNDS: partial(rounds.start_attempt, world),
        QUORUMS: groups.start_attempt,
        ONE_NODE: partial(one_node.start_attempt, world),
    }
    start = starts[world.conditions.engine]
    if world.conditions.engine == QUORUMS:
        world.scheduler.spawn(groups.run_lighthouse(), Life())
    Faults(world, start).schedule()
    violation = None
    try:
        world.scheduler.run(_LIMIT, lambda: world.ledger.finished)
        check(world.ledger.finished, "the run does not finish")
        world.scheduler.run(world.now + _LATE, lambda: False)
    except Violation as err:
        violation = str(err)
    return Outcome(
        seed=seed,
        violation=violation,
        scheduler=world.scheduler,
        claims=[row for row in world.ledger.rows if isinstance(row, ClaimRow)],
        replayed=world.truth.replayed,
    )
