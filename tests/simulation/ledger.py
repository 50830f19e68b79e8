"""The consumption ledger: rows that are only appended, under compare-and-set, by writers that may hear no answer."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.simulation import values
from tests.simulation.scheduler import Process
from tests.simulation.world import Node, World

_TRIES = 12


class Refused(Exception):
    """A rule forbids the append. `reading` is what it was decided from."""

    def __init__(self, rule: str, reading: Reading) -> None:
        super().__init__(rule)
        self.rule = rule
        self.reading = reading


class OutcomeUnknown(Exception):
    """The ledger gave no answer for too long. The append may have landed, or may still land."""


class Reading:
    """One read of the ledger."""

    def __init__(self, rows: list[values.Row]) -> None:
        self.rows = rows
        self.fence = rows[-1].fence if rows else values.Fence(0, 0, 0, 0)

    @property
    def finished(self) -> bool:
        """Return whether the run is finished."""
        return any(isinstance(row, values.FinishRow) for row in self.rows)

    @property
    def appends(self) -> set[int]:
        """Return the names of all appends."""
        return {row.append_id for row in self.rows}

    @property
    def leg(self) -> int:
        """Return the leg of the last claim or rewind."""
        return next((row.leg for row in reversed(self.rows) if isinstance(row, values.ClaimRow)), 0)

    @property
    def legs(self) -> int:
        """Return the greatest leg so far."""
        return max((row.leg for row in self.rows if isinstance(row, values.ClaimRow)), default=0)

    @property
    def quarantined(self) -> set[int]:
        """Return the checkpoints that are known to be damaged."""
        return {each for row in self.rows if isinstance(row, values.QuarantineRow) for each in row.damaged}

    @property
    def rewind_seq(self) -> int:
        """Return the seq of the last rewind, 0 if there is none."""
        return next((row.fence.seq for row in reversed(self.rows) if isinstance(row, values.RewindRow)), 0)

    def checkpoints(self) -> list[values.CheckpointRow]:
        """Return all checkpoints, the initial one first."""
        return [values.BEGINNING, *(row for row in self.rows if isinstance(row, values.CheckpointRow))]

    def checkpoint(self, name: int) -> values.CheckpointRow:
        """Return the row of a checkpoint."""
        return next(row for row in self.checkpoints() if row.checkpoint == name)

    @property
    def head(self) -> values.CheckpointRow:
        """Return the row of the head."""
        return self.checkpoint(self.fence.head)

    def lineage(self, name: int) -> list[values.CheckpointRow]:
        """Return a checkpoint and its ancestors, the newest first."""
        found = [self.checkpoint(name)]
        while found[-1].checkpoint:
            found.append(self.checkpoint(found[-1].parent))
        return found

    def claim(self, nonce: int) -> values.ClaimRow | None:
        """Return the claim of an attempt."""
        return next((row for row in self.rows if isinstance(row, values.ClaimRow) and row.fence.nonce == nonce), None)

    def base(self, nonce: int) -> int:
        """Return the head that an attempt started from: as its claim and its quarantine left it."""
        starts = [
            row
            for row in self.rows
            if isinstance(row, values.ClaimRow | values.QuarantineRow) and row.fence.nonce == nonce
        ]
        return starts[-1].fence.head if starts else self.fence.head

    def quorums(self, nonce: int, after: int = -1) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return number, append and members of the quorums of an attempt. Its claim is quorum 0."""
        found: list[tuple[int, int, tuple[int, ...]]] = []
        for row in self.rows:
            if row.fence.nonce == nonce and isinstance(row, values.ClaimRow | values.QuorumRow):
                number = row.number if isinstance(row, values.QuorumRow) else 0
                found.append((number, row.append_id, row.members))
        return [each for each in found if each[0] > after]


Decide = Callable[[Reading], values.Row]


def extend(fence: values.Fence, *, head: int | None = None) -> values.Fence:
    """Return the fence after one more append by its owner."""
    return values.Fence(fence.attempt, fence.nonce, fence.seq + 1, fence.head if head is None else head)


class Ledger:
    """The table, and how its writers use it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.rows: list[values.Row] = []
        self.finished = False

    def read(self) -> Reading:
        """Return the rows of this moment."""
        return Reading(self.rows.copy())

    def look(self, node: Node) -> Process[Reading]:
        """Read from a node. Raise `OutcomeUnknown` if the catalog is unavailable for long."""
        world = self._world
        for _ in range(_TRIES):
            yield world.between(0.05, 0.3)
            if world.reaches_ledger(node):
                return self.read()
            yield 1.0
        raise OutcomeUnknown

    def append(self, node: Node, append_id: int, decide: Decide) -> Process[Reading]:
        """Read, decide, append, and repeat on a conflict or without an answer. Return a read that has the append.

        `decide` raises `Refused`. Raise `OutcomeUnknown` after too many tries.
        """
        world = self._world
        for _ in range(_TRIES):
            reading = yield from self.look(node)
            if not world.rules.is_new(append_id, reading.appends):
                return reading
            try:
                row = decide(reading)
            except Refused as refused:
                world.truth.check_refusal(append_id, refused)
                raise
            answer: list[Reading] = []
            answers, takes = self._fate(node)
            if takes is not None:
                world.scheduler.call(takes, partial(self._land, reading.fence.seq, row, answer))
            yield world.between(0.3, 0.9)
            world.reach("append")
            if answers and answer and world.reaches_ledger(node):
                return answer[0]
        raise OutcomeUnknown

    def _fate(self, node: Node) -> tuple[bool, float | None]:
        """Return whether a request is answered, and after how long it lands, if it does."""
        world = self._world
        if world.happens(world.conditions.lost) or not world.reaches_ledger(node):
            return False, world.rng.choice((None, 0.2, 0.2, world.between(1.0, 25.0)))
        return True, world.between(0.05, 0.3)

    def _land(self, read_seq: int, row: values.Row, answer: list[Reading]) -> None:
        world, reading = self._world, self.read()
        if not world.rules.is_unchanged(read_seq, reading.fence.seq):
            return
        self.rows.append(row)
        self.finished |= isinstance(row, values.FinishRow)
        world.note("ledger: {} {}", row.fence.seq, row)
        answer.append(self.read())
        world.truth.check_append(row, reading)
