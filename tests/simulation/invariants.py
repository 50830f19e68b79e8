"""The invariants of every schedule. They read a record of what happened, which the protocol never reads."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.simulation.ledger import Reading, Refused
from tests.simulation.values import (
    GENESIS,
    LAST_STEP,
    CheckpointRow,
    ClaimRow,
    FinishRow,
    QuarantineRow,
    QuorumRow,
    RewindRow,
    Row,
    Stamp,
    State,
    digest_rows,
    rows_of,
)
from tests.simulation.world import ONE_NODE

if TYPE_CHECKING:
    from tests.simulation.world import Node, World


MOST_COPIES = 4
"""Maximum number of copies in a node's memory: the copy that its attempt started from, and three copies of the attempt."""


GROUP_KILLED = "kill a group"
"""The fault that ends one of several groups of a node that have the state."""


class Violation(AssertionError):
    """An invariant does not hold."""


def check(holds: bool, text: str, *facts: object) -> None:
    """Raise `Violation` unless the invariant holds."""
    if not holds:
        raise Violation(text.format(*facts))


class Truth:
    """A record of all states that training made and of all copies in memory, and the checks against it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._made: dict[int, tuple[int, int]] = {}
        """Bits of a state -> the bits that it was made from, and the nonce of the attempt that made it."""
        self._holders: dict[Stamp, list[set[int]]] = {}
        """Copy -> nodes that have held each of its parts."""
        self.whole: dict[int, int] = {}
        """Nonce of an attempt -> its newest step with each part held by two nodes."""
        self._seen: dict[int, dict[int, int]] = {}
        """Nonce of a claim -> `whole` when its coordinator looked for copies."""
        self._faults_before: dict[int, int] = {}
        """Nonce of an attempt -> faults before it started."""
        self._last_step: dict[int, int] = {}
        """Nonce of an attempt -> the last step that it executed."""
        self._applied_by_all: dict[int, State] = {}
        """Nonce of an attempt -> the last state that all groups of a quorum reached."""
        self.replayed: Counter[int] = Counter()
        """Steps executed again after single faults whose memory was whole."""

    # Reports of the engines

    def make(self, before: State, rows: int, nonce: int) -> State:
        """Execute a step: return a state that no other execution makes."""
        state = State(before.step + 1, rows, self._world.number())
        self._made[state.bits] = (before.bits, nonce)
        self._last_step[nonce] = state.step
        return state

    def hold(self, stamp: Stamp, index: int, node: Node) -> None:
        """Record that a node holds a whole part. A copy that two nodes hold survives the loss of one."""
        if len(node.memory) > MOST_COPIES:
            copies = {held.stamp for held in node.memory if held.stamp.nonce in self._faults_before}
            check(len(copies) <= MOST_COPIES, "{} holds {} copies in memory", node.name, len(copies))
        holders = self._holders.setdefault(stamp, [set() for _ in range(stamp.parts)])
        holders[index].add(node.number)
        if all(len(each) > 1 for each in holders):
            self.whole[stamp.nonce] = max(stamp.step, self.whole.get(stamp.nonce, 0))

    def look(self, nonce: int) -> None:
        """Record what a coordinator can find that looks for copies now. A cut network hides some."""
        world = self._world
        self._seen[nonce] = self.whole.copy() if world.side == [0] * len(world.nodes) else {}

    def start(self, reading: Reading, claim: ClaimRow, state: State) -> None:
        """Check the state that an attempt starts from. `reading` is of the time of its claim, or of its quarantine."""
        nonce = claim.fence.nonce
        self._check_descent(reading, state, reading.head, f"attempt {claim.fence.attempt}", claim.leg)
        step = reading.head.state.step if claim.memory is None else claim.memory.step
        check(state.step == step, "attempt {} starts at step {}, not {}", claim.fence.attempt, state.step, step)
        self._check_memory_kept(reading, claim, state)
        self._check_groups_live(reading, claim)
        # a cut that is still there, and the attempt of its other side, belong to the faults of this attempt
        self._faults_before[nonce] = len(self._world.faults) - any(self._world.side)
        if claim.memory is not None and self._is_held_twice(claim.memory):
            self.whole[nonce] = state.step

    def _is_held_twice(self, stamp: Stamp) -> bool:
        """Return whether two live nodes hold each part of a copy now."""
        held = Counter(
            (part.stamp, part.index) for node in self._world.nodes for part in node.memory if part.digest_holds
        )
        return all(held[stamp, index] > 1 for index in range(stamp.parts))

    def _check_groups_live(self, reading: Reading, claim: ClaimRow) -> None:
        """Check that one lost group of several does not end their attempt."""
        nonces = [row.fence.nonce for row in reading.rows if row.fence.attempt == claim.replaces]
        is_only_fault = self._world.faults == [GROUP_KILLED] and not self._world.conditions.lost
        was_struck = any(self._faults_before.get(nonce) == 0 for nonce in nonces)
        check(not (is_only_fault and was_struck), "attempt {} ends with one of its groups", claim.replaces)

    def _check_memory_kept(self, reading: Reading, claim: ClaimRow, state: State) -> None:
        """Check that one fault does not lose a copy with each part held by two nodes."""
        claims = [row for row in reading.rows if isinstance(row, ClaimRow) and row.fence.attempt == claim.replaces]
        if not claims or isinstance(claims[0], RewindRow) or claims[0].leg != claim.leg:
            return
        nonce = claims[0].fence.nonce
        faults = self._world.faults[self._faults_before.get(nonce, 0) :]
        whole = self._seen[claim.fence.nonce].get(nonce, 0)
        if len(faults) != 1 or not faults[0].startswith("kill") or not whole:
            return
        check(state.step >= whole, "one fault ({}) loses step {}, which was whole in memory", faults[0], whole)
        prompt = self._world.conditions.send < 1 and not self._world.conditions.torn
        replayed = max(0, self._last_step.get(nonce, whole) - state.step)
        check(replayed <= 2 or not prompt, "{} steps are executed again after one fault ({})", replayed, faults[0])
        self.replayed[replayed] += 1

    # The ledger

    def check_refusal(self, append_id: int, refused: Refused) -> None:
        """Check that an append is not refused because it has landed."""
        check(append_id not in refused.reading.appends, "append {} is refused after it landed: {}", append_id, refused)

    def check_append(self, row: Row, before: Reading) -> None:
        """Check a row that landed. `before` is the ledger without it."""
        fence, after = before.fence, row.fence
        check(after.seq == fence.seq + 1, "seq {} does not follow seq {}", after.seq, fence.seq)
        check(row.append_id not in before.appends, "append {} landed twice", row.append_id)
        if isinstance(row, ClaimRow):
            check(not before.finished, "attempt {} claims a finished run", after.attempt)
            message = "attempt {} replaces {}, not the current one"
            check(row.replaces == fence.attempt, message, after.attempt, row.replaces)
            check(after.attempt == fence.attempt + 1, "attempt {} does not follow {}", after.attempt, fence.attempt)
        else:
            check((after.attempt, after.nonce) == (fence.attempt, fence.nonce), "{} changes the owner", row)
        if isinstance(row, RewindRow):
            check(after.head not in before.quarantined, "a rewind makes damaged checkpoint {} the head", after.head)
        if isinstance(row, QuarantineRow):
            for each in row.damaged:
                check(self._world.files[each].damaged, "checkpoint {} is quarantined, and is not damaged", each)
        if isinstance(row, CheckpointRow):
            self._check_checkpoint(row, before)
        if isinstance(row, QuorumRow):
            last = before.quorums(after.nonce)[-1][0]
            check(row.number == last + 1, "quorum {} does not follow {}", row.number, last)
        if isinstance(row, FinishRow):
            self._check_finish(before)

    def _check_checkpoint(self, row: CheckpointRow, before: Reading) -> None:
        files, name = self._world.files[row.checkpoint], f"checkpoint {row.checkpoint}"
        check(len(files.whole) == files.ranks, "{} is committed with the files of ranks {} only", name, files.whole)
        check(row.nonce == before.fence.nonce, "{} is of an attempt that does not own the run", name)
        check(row.parent == before.fence.head, "{} extends {}, which is not the head", name, row.parent)
        parent = before.checkpoint(row.parent)
        expected = [(step, rows_of(before.leg, step)) for step in range(parent.state.step + 1, row.state.step + 1)]
        check(list(row.named) == expected, "{} names the rows of steps {}", name, [step for step, _ in row.named])
        # groups of one node may do a step again that one of them has committed
        is_exact = self._world.conditions.engine != ONE_NODE or parent.nonce != row.nonce
        check(is_exact or row.state.step > parent.state.step, "{} repeats the step of its parent", name)
        self._check_descent(before, row.state, parent, name, before.leg, is_exact=is_exact)

    def _check_descent(
        self, reading: Reading, state: State, parent: CheckpointRow, name: str, leg: int, *, is_exact: bool = True
    ) -> None:
        """Check that a state is made from a checkpoint, by attempts after the last rewind, with each row once.

        Unless it must be exact, it may be made from another state of the same rows.
        """
        rows = parent.state.rows
        for step in range(parent.state.step + 1, state.step + 1):
            rows = digest_rows(rows, rows_of(leg, step))
        message = "{} has other rows than those of leg {} after checkpoint {}"
        check(state.rows == rows, message, name, leg, parent.checkpoint)
        bits = state.bits
        for step in range(state.step, parent.state.step, -1):
            check(bits in self._made, "{} has a state of step {} that no training made", name, step)
            bits, nonce = self._made[bits]
            claim = reading.claim(nonce)
            check(claim is not None, "{} has a state of step {} that no attempt of the run made", name, step)
            assert claim is not None
            check(claim.fence.seq > reading.rewind_seq, "{} has step {} of an abandoned lineage", name, step)
        check(
            bits == parent.state.bits or not is_exact, "{} does not descend from checkpoint {}", name, parent.checkpoint
        )

    def _check_finish(self, reading: Reading) -> None:
        """Check that the surviving lineage has every row once, in order."""
        lineage = reading.lineage(reading.fence.head)[::-1]
        steps = [step for row in lineage for step, _ in row.named]
        check(steps == list(range(1, LAST_STEP + 1)), "the finished run has the steps {}", steps)
        consumed = [each for row in lineage for _, rows in row.named for each in rows]
        check(len(consumed) == len(set(consumed)), "a row is consumed twice")

    # Steps of groups

    def check_step(self, nonce: int, quorum: int, members: tuple[int, ...]) -> None:
        """Check that a step is executed by the last recorded quorum of its attempt."""
        recorded = self._world.ledger.read().quorums(nonce)
        check(bool(recorded), "a group trains in an attempt without a claim")
        number, _, nodes = recorded[-1]
        last = (number, nodes)
        check(last == (quorum, members), "quorum {} of {} trains, and {} is recorded", quorum, members, last)

    def check_applied(self, nonce: int, states: set[State], by_all: bool) -> None:
        """Check that groups have one state after a step, and keep every step that all groups of a quorum applied."""
        check(len(states) == 1, "groups of one quorum have {}", states)
        state = states.pop()
        check(state.bits in self._made, "a group has a part of a refused step")
        kept = self._applied_by_all.get(nonce, GENESIS)
        bits = state.bits
        for _ in range(kept.step, state.step):
            bits = self._made[bits][0] if bits in self._made else bits
        check(not kept.step or bits == kept.bits, "step {} is lost, which all groups had applied", kept.step)
        if by_all:
            self._applied_by_all[nonce] = state
