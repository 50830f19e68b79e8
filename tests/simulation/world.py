"""The world of one schedule: nodes with memory, the network between them, the store of checkpoints, and its conditions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tests.simulation.rules import Rules
from tests.simulation.scheduler import Life, Process, Scheduler
from tests.simulation.values import BATCH, GENESIS, ClaimRow, Part, Stamp, State

if TYPE_CHECKING:
    from tests.simulation.invariants import Truth
    from tests.simulation.ledger import Ledger
    from tests.simulation.one_node import Group as Replica
    from tests.simulation.steps import Group

ROUNDS, QUORUMS, ONE_NODE = ENGINES = ("rounds", "quorums", "one node")
"""All ranks as one group; replica groups on several nodes; and replica groups on one node, the engine that is built."""
PATIENCE = 6.0
"""Time without progress after which a node counts a launch or an attempt as lost."""


@dataclass(eq=False)
class Node:
    """A node. `ranks` ends with its processes, `life` with the node, whose agent holds copies in memory."""

    number: int
    life: Life = field(default_factory=Life)
    ranks: Life = field(default_factory=Life)
    memory: list[Part] = field(default_factory=list)
    floor: tuple[int, int] = (0, 0)
    """The newest attempt that it knows, and the step of its newest whole copy."""
    trains: bool = False
    """True if its ranks belong to an attempt or a launch."""
    progress: float = 0.0
    """Time of the last progress of its attempt or launch."""
    group: Group | None = None
    """Its replica group, if groups of several nodes train together per step."""
    replicas: list[Replica] = field(default_factory=list)
    """The replica groups that a supervisor on it has started last."""

    @property
    def name(self) -> str:
        """Return its name in the log."""
        return f"node {self.number}"

    def restart_ranks(self) -> Life:
        """End the ranks on this node and start others. Return their lifetime."""
        self.ranks.ended = True
        self.ranks, self.group, self.trains = Life(), None, False
        return self.ranks

    def stop(self) -> None:
        """End the node with its ranks and its memory."""
        self.life.ended = self.ranks.ended = True
        self.memory, self.floor, self.group, self.trains = [], (0, 0), None, False


@dataclass
class Files:
    """Files of a staged checkpoint in the store."""

    state: State
    ranks: int
    whole: set[int] = field(default_factory=set)
    """Ranks whose files are whole."""
    damaged: bool = False


@dataclass(kw_only=True)
class Conditions:
    """The profile of one seed: its engine, its latencies, and how often its operators and its network misbehave."""

    engine: str
    """One of ENGINES."""
    nodes: int
    interval: int
    """Steps from one durable checkpoint to the next."""
    upload: float
    """Longest time for which a rank uploads a checkpoint."""
    propose: float
    """Longest time between two looks of the lighthouse."""
    send: float
    """Longest time for which a copy is on its way to its buddy."""
    torn: float
    """Share of copies that arrive torn."""
    lost: float
    """Share of appends whose request or answer is lost, or late."""
    pause: float
    """Share of claims and commits before which their writer is suspended for long."""
    new_leg: float
    """Share of launches that begin a new leg."""


class World:
    """The shared state of the processes of one schedule."""

    ledger: Ledger
    truth: Truth

    def __init__(self, seed: int, rules: type[Rules]) -> None:
        self.scheduler = Scheduler(seed)
        self.rng, self.note = self.scheduler.rng, self.scheduler.note
        self.rules = rules
        rng = self.rng
        self.conditions = Conditions(
            engine=ENGINES[seed % len(ENGINES)],
            nodes=rng.choice((2, 3, 3, 4)),
            interval=rng.choice((2, 3, 5)),
            upload=rng.choice((0.4, 2.5)),
            propose=rng.choice((1.2, 4.0)),
            send=rng.choice((0.8, 0.8, 3.0, 6.0)),
            torn=rng.choice((0.0, 0.0, 0.3)),
            lost=rng.choice((0.0, 0.05, 0.3)),
            pause=rng.choice((0.0, 0.0, 0.3)),
            new_leg=rng.choice((0.0, 0.0, 0.2)),
        )
        self.nodes = [Node(number) for number in range(self.conditions.nodes)]
        self.side = [0] * self.conditions.nodes
        """Side of a network cut that each node is on."""
        self.cut_off: set[int] = set()
        """Sides that do not reach the ledger."""
        self.lighthouses = {0}
        """Sides that have a lighthouse."""
        self.ledger_away = self.store_away = False
        self.files = {0: Files(GENESIS, 0)}
        self.faults: list[str] = []
        self.waiting_faults: dict[str, Callable[[], None]] = {}
        """Phase of the protocol -> fault that strikes when a process reaches it."""
        self.over = False
        """True once all nodes and services work, and no more faults strike."""
        self._numbers = 0

    @property
    def now(self) -> float:
        """Return the time."""
        return self.scheduler.now

    def number(self) -> int:
        """Return a number that names something."""
        self._numbers += 1
        return self._numbers

    def garbage(self, step: int) -> State:
        """Return a state that no training makes: of damaged files, or of parts that do not belong together."""
        return State(step, -self.number(), -self.number())

    def between(self, low: float, high: float) -> float:
        """Return a random time."""
        return low + (high - low) * self.rng.random()

    def happens(self, share: float) -> bool:
        """Return True in a share of all cases. Nothing happens once the faults are over."""
        return not self.over and share > 0 and self.rng.random() < share

    def reach(self, phase: str) -> None:
        """Let a fault strike that waits for a phase of the protocol."""
        strike = self.waiting_faults.pop(phase, None)
        if strike is not None:
            self.note("in phase {}:", phase)
            strike()

    def linked(self, one: Node, other: Node) -> bool:
        """Return whether two live nodes reach each other."""
        return not (one.life.ended or other.life.ended) and self.side[one.number] == self.side[other.number]

    def reached_from(self, node: Node) -> list[Node]:
        """Return the live nodes that a node reaches, itself included."""
        return [other for other in self.nodes if self.linked(node, other)]

    def reaches_ledger(self, node: Node) -> bool:
        """Return whether the catalog answers a node."""
        return not (self.ledger_away or node.life.ended or self.side[node.number] in self.cut_off)

    def advance(self, nodes: list[Node]) -> None:
        """Record progress of an attempt or a launch on nodes."""
        for node in nodes:
            node.progress = self.now

    # Checkpoints in the store

    def upload(self, checkpoint: int, rank: int) -> Process[None]:
        """Write the files of one rank. They are whole at the end only."""
        yield self.between(0.2, self.conditions.upload)
        self.reach("upload")
        while self.store_away:
            yield 1.0
        self.files[checkpoint].whole.add(rank)

    def verify(self, checkpoint: int) -> str:
        """Compare the digests of a checkpoint: `intact`, `damaged` or `unavailable`."""
        if checkpoint and self.store_away:
            return "unavailable"
        return "damaged" if self._is_damaged(checkpoint) else "intact"

    def load(self, checkpoint: int, state: State) -> State:
        """Read a checkpoint. Damaged files make another state."""
        return self.garbage(state.step) if self._is_damaged(checkpoint) else state

    def _is_damaged(self, checkpoint: int) -> bool:
        files = self.files[checkpoint]
        return files.damaged or len(files.whole) < files.ranks

    # Copies in memory

    def hold(self, node: Node, part: Part, whole_step: int) -> None:
        """Keep a part in the memory of a node, and make room."""
        node.floor = max(node.floor, (part.stamp.attempt, whole_step))
        kept = [held for held in node.memory if not self.rules.may_evict(held.stamp, node.floor)]
        node.memory = [held for held in kept if (held.stamp, held.index) != (part.stamp, part.index)]
        if not self.rules.is_current(part.stamp.attempt, node.floor[0]):
            return
        node.memory.append(part)
        if part.digest_holds:
            self.truth.hold(part.stamp, part.index, node)

    def drop_copies(self, node: Node, claim: ClaimRow) -> None:
        """Make room for the copies of an attempt that starts."""
        node.floor = (claim.fence.attempt, 0)
        node.memory = [held for held in node.memory if self.rules.is_kept(held.stamp, claim.memory)]

    def copy(self, node: Node, part: Part, whole_step: int) -> Process[None]:
        """Copy a rank's part into the memory of its node. A rank that is killed leaves a torn part."""
        self.hold(node, replace(part, digest_holds=False), whole_step)
        yield self.between(0.05, 0.4)
        self.reach("copy")
        self.hold(node, part, whole_step)

    def parts_reached(self, node: Node) -> list[Part]:
        """Return all parts of copies on the nodes that a node reaches."""
        return [part for other in self.reached_from(node) for part in other.memory]

    def assemble(self, parts: list[Part], wanted: Stamp) -> State | None:
        """Return the state of a copy, or None if a part of it is missing. Parts of several copies make another state."""
        found: dict[int, Part] = {}
        for part in parts:
            if part.index not in found and self.rules.is_of_copy(part.stamp, wanted) and self.rules.is_whole(part):
                found[part.index] = part
        if not all(index in found for index in range(wanted.parts)):
            return None
        states = {found[index].state for index in range(wanted.parts)}
        if len(states) == 1 and all(found[index].digest_holds for index in range(wanted.parts)):
            return states.pop()
        return self.garbage(wanted.step)


def share_of(rows: range, index: int, size: int) -> range:
    """Return the part of a global batch that one of `size` groups reads. Sizes that do not divide it get uneven parts."""
    return rows[BATCH * index // size : BATCH * (index + 1) // size]
