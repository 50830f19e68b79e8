"""The rules of the protocol in docs/design/0030-memory-states.md: pure functions. A dropped rule permits everything."""

from collections.abc import Collection, Sequence
from typing import TypeVar

from tests.simulation.values import ClaimRow, Fence, Part, Stamp

T = TypeVar("T")


class Rules:
    """All rules. Each is named for what it permits."""

    # Appends to the ledger

    @staticmethod
    def is_unchanged(read_seq: int, seq: int) -> bool:
        """An append lands only on the ledger that its writer read."""
        return read_seq == seq

    @staticmethod
    def is_new(append_id: int, landed: Collection[int]) -> bool:
        """An append whose answer was lost is looked up before it is repeated."""
        return append_id not in landed

    @staticmethod
    def owns_run(fence: Fence, attempt: int, nonce: int) -> bool:
        """Only the attempt that the fence names appends, except for claims and rewinds."""
        return (fence.attempt, fence.nonce) == (attempt, nonce)

    @staticmethod
    def is_unfinished(finished: bool) -> bool:
        """A finished run takes no more claims and rewinds."""
        return not finished

    @staticmethod
    def replaces_current(fence: Fence, replaced: int) -> bool:
        """A claim replaces the attempt that its coordinator saw fail. If another one is current, it steps aside."""
        return fence.attempt == replaced

    @staticmethod
    def is_restorable(checkpoint: int, quarantined: Collection[int]) -> bool:
        """A rewind goes back to no checkpoint that is known to be damaged."""
        return checkpoint not in quarantined

    # Durable checkpoints

    @staticmethod
    def have_all_voted(votes: Collection[int], ranks: int) -> bool:
        """A checkpoint is committed once the files of every rank are whole in the store."""
        return len(votes) == ranks

    @staticmethod
    def extends_head(fence: Fence, parent: int) -> bool:
        """A checkpoint's parent is the head."""
        return fence.head == parent

    @staticmethod
    def follows_parent(step: int, parent_step: int) -> bool:
        """A checkpoint names the rows of the steps after its parent's, trained by any attempt."""
        return step > parent_step

    @staticmethod
    def is_intact(answer: str) -> bool:
        """An attempt trains from a checkpoint whose digests hold."""
        return answer == "intact"

    @staticmethod
    def is_damage(answer: str) -> bool:
        """A checkpoint is quarantined if its files differ, and not if the store is unavailable."""
        return answer == "damaged"

    # Copies in memory

    @staticmethod
    def is_whole(part: Part) -> bool:
        """A part of a copy counts if its digest holds."""
        return part.digest_holds

    @staticmethod
    def is_of_copy(stamp: Stamp, wanted: Stamp) -> bool:
        """All parts have one stamp, which equals the claim's."""
        return stamp == wanted

    @staticmethod
    def is_claimed(claim: ClaimRow | None) -> bool:
        """A copy counts if the ledger has the claim of the attempt that made it."""
        return claim is not None

    @staticmethod
    def is_unrewound(claim_seq: int, rewind_seq: int) -> bool:
        """A copy counts if no rewind followed the claim of the attempt that made it."""
        return rewind_seq < claim_seq

    @staticmethod
    def continues_head(stamp: Stamp, base: int, head: int, head_nonce: int, head_quorum: int) -> bool:
        """A copy descends from the head.

        Either its attempt started from the head, or committed it in the copy's quorum or an earlier one. `base` is the
        head that the attempt started from.
        """
        return head == base or (head_nonce == stamp.nonce and head_quorum <= stamp.quorum)

    @staticmethod
    def is_at_head(step: int, head_step: int) -> bool:
        """A copy is not older than the head."""
        return step >= head_step

    @staticmethod
    def is_same_leg(leg: int, claim_leg: int) -> bool:
        """A claim that begins a new leg reads the store, because a leg begins at a committed checkpoint."""
        return leg == claim_leg

    @staticmethod
    def may_evict(held: Stamp, floor: tuple[int, int]) -> bool:
        """A copy makes room once a newer one is whole at all ranks and their buddies.

        `floor` is the newest attempt that a node knows, and the step of its newest whole copy, or 0 before it has one.
        """
        return floor[1] > 0 and (held.attempt, held.step) < floor

    @staticmethod
    def is_kept(held: Stamp, memory: Stamp | None) -> bool:
        """When an attempt starts, its nodes keep the copy that its claim names, and drop all others."""
        return held == memory

    @staticmethod
    def is_current(attempt: int, newest: int) -> bool:
        """A node takes no copy of an older attempt than the newest one that it knows."""
        return attempt >= newest

    # Steps of groups that train together

    @staticmethod
    def succeeds_quorum(later: Collection[int], joined: Collection[int]) -> bool:
        """A quorum follows the one in which its donors trained last.

        Quorums that the donors joined and never trained in do not count, because no step was executed in them. So a row
        that landed without an answer does not stop its own members. `later` are the appends recorded since then.
        """
        return all(append in joined for append in later)

    @staticmethod
    def reaches_head(step: int, head_step: int) -> bool:
        """A quorum starts from a state that is not older than the head."""
        return step >= head_step

    @staticmethod
    def is_donor(quorum: int, base: int) -> bool:
        """Only groups that trained in the last quorum pass on their states. All others heal, whatever they have."""
        return quorum == base

    @staticmethod
    def is_recorded(answered: bool) -> bool:
        """The first step of a quorum waits for its row in the ledger."""
        return answered

    @staticmethod
    def is_healed(position: tuple[int, int], newest: tuple[int, int]) -> bool:
        """A group contributes once it has the newest state.

        A position is a quorum and a step that it executed. The same step has other bits in another quorum.
        """
        return position == newest

    @staticmethod
    def is_in_quorum(quorum: int, joined: int) -> bool:
        """A group trains in the quorum that it joined last, and records no other."""
        return quorum == joined

    @staticmethod
    def have_all_contributed(present: Sequence[T], members: Sequence[T]) -> bool:
        """A step is executed with the gradients of every member, because each has a different part of the batch."""
        return len(present) == len(members)

    @staticmethod
    def have_ranks_voted(votes: Sequence[bool]) -> bool:
        """A group applies a step if all of its ranks received the reduced gradients."""
        return all(votes)

    # Steps of groups of one node

    @staticmethod
    def has_newest(step: int, newest: int) -> bool:
        """A group contributes once it has a state of the newest step among those present."""
        return step == newest

    @staticmethod
    def is_same_execution(quorum: int, first: int) -> bool:
        """Groups train together if their last steps were done in one quorum. Those that differ from the first one heal."""
        return quorum == first

    @staticmethod
    def is_beyond_head(step: int, head_step: int) -> bool:
        """A group commits its state after another group's checkpoint only if that is of an earlier step."""
        return step > head_step

    # Commits of groups of several nodes

    @staticmethod
    def stays_member(node: int, later: Sequence[Sequence[int]]) -> bool:
        """A group commits what it staged if it is a member of all quorums recorded since."""
        return all(node in members for members in later)


NAMES = tuple(name for name, rule in vars(Rules).items() if isinstance(rule, staticmethod))
"""All rules by name."""


def without(*names: str) -> type[Rules]:
    """Return the rules, with the named ones replaced by rules that permit everything."""
    return type("Fewer", (Rules,), {name: staticmethod(lambda *_: True) for name in names})
