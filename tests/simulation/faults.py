"""The faults of one schedule. After the last one all nodes and services work again, and the run must finish."""

from collections.abc import Callable
from functools import partial

from tests.simulation.coordinator import Start, launch, rewind, watch
from tests.simulation.invariants import GROUP_KILLED
from tests.simulation.one_node import Group
from tests.simulation.scheduler import Life
from tests.simulation.values import LAST_STEP, Part, Stamp
from tests.simulation.world import ONE_NODE, ROUNDS, Node, World

FAULTS_END = 45.0
"""Time from which no faults occur."""
_PHASES_OF_ROUNDS = ("forward", "copy", "upload", "append", "load")
_PHASES_PER_STEP = ("forward", "reduce", "apply", "apply", "apply", "heal", "upload", "append", "load")
"""Phases in which faults strike. Most rules of quorums matter while a step is applied by some groups and not by others."""


class Faults:
    """Faults that strike a world at random times."""

    def __init__(self, world: World, start: Start) -> None:
        self._world = world
        self._start = start

    def schedule(self) -> None:
        """Start the agents of all nodes, and choose the faults of this schedule."""
        for node in self._world.nodes:
            self._start_agent(node, self._world.between(0.0, 1.0))
        rng = self._world.rng
        engine, splits = self._world.conditions.engine, rng.random() < 0.4
        kinds: list[tuple[Callable[[], None], int]] = [
            (self._kill_ranks, 4),
            (self._kill_node, 4),
            (self._kill_buddies, 2),
            (self._kill_all_ranks, 2),
            (self._cut_network, 4),
            (self._isolate_node, 12 * splits),
            (self._suspend_ledger, 1),
            (self._suspend_store, 2),
            (self._suspend_lighthouse, 2 * (engine != ROUNDS)),
            (self._kill_group, 8 * (engine == ONE_NODE)),
            (self._suspend_group, 8 * (engine == ONE_NODE)),
            (self._damage_head, 3),
            (self._rewind, 3),
            (self._launch_again, 2),
            (self._rehearse, 2),
        ]
        actions, weights = zip(*kinds, strict=True)
        at = rng.uniform(2.0, 12.0)
        for action in rng.choices(actions, weights, k=rng.choice((0, 1, 1, 2, 3, 4, 6))):
            self._world.scheduler.call(at, action if rng.random() < 0.5 else partial(self._strike_in_phase, action))
            at = min(at + rng.choice((rng.uniform(0.0, 3.0), rng.uniform(3.0, 15.0))), FAULTS_END)
        self._world.scheduler.call(FAULTS_END + 1, self._end_faults)

    def _strike_in_phase(self, strike: Callable[[], None]) -> None:
        """Let a fault strike when the protocol reaches a phase."""
        phases = _PHASES_OF_ROUNDS if self._world.conditions.engine == ROUNDS else _PHASES_PER_STEP
        self._world.waiting_faults[self._world.rng.choice(phases)] = strike

    def _strike(self, kind: str, *nodes: Node) -> None:
        self._world.faults.append(kind)
        self._world.note("fault: {} {}", kind, [node.number for node in nodes])

    def _any_node(self) -> Node:
        return self._world.rng.choice(self._world.nodes)

    def _kill_ranks(self) -> None:
        node = self._any_node()
        self._strike("kill ranks", node)
        node.ranks.ended = True

    def _kill_all_ranks(self) -> None:
        """End the ranks of all nodes, as a defect of the training script does."""
        self._strike("kill ranks of all nodes", *self._world.nodes)
        for node in self._world.nodes:
            node.ranks.ended = True

    def _any_group(self) -> Group | None:
        """Return a live group of a node that trains several, if one does."""
        live = [group for node in self._world.nodes for group in node.replicas if not group.life.ended]
        return self._world.rng.choice(live) if live else None

    def _kill_group(self) -> None:
        if group := self._any_group():
            left = [each for node in self._world.nodes if group in node.replicas for each in node.replicas]
            has_state = any(each.state and not each.life.ended for each in left if each is not group)
            self._strike(GROUP_KILLED if has_state else "kill the last group with a state")
            group.life.ended = True

    def _suspend_group(self) -> None:
        """Let a group fall silent. The others train on without it."""
        if group := self._any_group():
            self._strike("a group is silent")
            group.silent_until = self._world.now + self._world.between(1.0, 6.0)

    def _kill_node(self) -> None:
        node = self._any_node()
        self._strike("kill node", node)
        self._stop(node)

    def _kill_buddies(self) -> None:
        node = self._any_node()
        buddy = self._world.nodes[(node.number + 1) % len(self._world.nodes)]
        self._strike("two nodes at once", node, buddy)
        self._stop(node)
        self._stop(buddy)

    def _stop(self, node: Node) -> None:
        node.stop()
        self._world.scheduler.call(self._world.between(2.0, 15.0), lambda: self._restart(node))

    def _restart(self, node: Node) -> None:
        if node.life.ended:
            node.life, node.ranks = Life(), Life()
            self._start_agent(node)

    def _start_agent(self, node: Node, delay: float = 0.0) -> None:
        self._world.scheduler.spawn(watch(self._world, node, self._start), node.life, delay)

    def _cut_network(self) -> None:
        world = self._world
        world.side = [world.rng.choice((0, 0, 1)) for _ in world.nodes]
        world.cut_off = {side for side in (0, 1) if world.rng.random() < 0.3}
        world.lighthouses = world.rng.choice(({0}, {0}, {1}, {0, 1}))
        self._strike("cut", *(node for node in world.nodes if world.side[node.number]))
        world.scheduler.call(world.between(1.0, 20.0), self._join_network)

    def _isolate_node(self) -> None:
        """Cut one node off from its peers and from the lighthouse, and not from the ledger and the store."""
        world, node = self._world, self._world.rng.choice((self._world.nodes[0], self._any_node()))
        world.side = [int(other is node) for other in world.nodes]
        world.cut_off, world.lighthouses = set(), {0}
        self._strike("isolated", node)
        world.scheduler.call(world.between(1.0, world.rng.choice((4.0, 4.0, 12.0))), self._join_network)

    def _join_network(self) -> None:
        world = self._world
        world.side, world.cut_off, world.lighthouses = [0] * len(world.nodes), set(), {0}

    def _suspend_ledger(self) -> None:
        self._strike("the ledger is unavailable")
        self._world.ledger_away = True
        self._world.scheduler.call(self._world.between(1.0, 10.0), self._resume_services)

    def _suspend_store(self) -> None:
        self._strike("the store is unavailable")
        self._world.store_away = True
        self._world.scheduler.call(self._world.between(3.0, 15.0), self._resume_services)

    def _suspend_lighthouse(self) -> None:
        self._strike("the lighthouse is lost")
        self._world.lighthouses = set()
        self._world.scheduler.call(self._world.between(1.0, 8.0), self._resume_services)

    def _resume_services(self) -> None:
        self._world.ledger_away = self._world.store_away = False
        self._world.lighthouses = {0}

    def _damage_head(self) -> None:
        head = self._world.ledger.read().fence.head
        if head:
            power_fails = self._world.rng.random() < 0.5
            nodes = self._world.nodes if power_fails else []
            self._strike(f"checkpoint {head} is damaged", *nodes)
            self._world.files[head].damaged = True
            for node in nodes:
                self._stop(node)

    def _rewind(self) -> None:
        node = self._any_node()
        self._strike("rewind", node)
        self._world.scheduler.spawn(rewind(self._world, node), node.life)

    def _launch_again(self) -> None:
        """Launch the run although it may train, as a second `train` or a resumed supervisor does."""
        node = self._any_node()
        self._strike("second launch", node)
        self._world.scheduler.spawn(launch(self._world, node, self._world.reached_from(node), self._start), node.life)

    def _rehearse(self) -> None:
        """Leave the copy of a rehearsal in memory, which trains in a sandbox and has no claim."""
        node, world = self._any_node(), self._world
        self._strike("rehearsal", node)
        reading = world.ledger.read()
        stamp = Stamp(LAST_STEP - 1, reading.fence.attempt, 0, world.number(), reading.leg, 1)
        world.hold(node, Part(stamp, 0, world.garbage(stamp.step)), 0)

    def _end_faults(self) -> None:
        self._world.over = True
        self._world.waiting_faults.clear()
        self._join_network()
        self._resume_services()
        for node in self._world.nodes:
            self._restart(node)
