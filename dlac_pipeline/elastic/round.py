"""Round of nodes, as one node sees it: its share of the ranks, the leader, and the messages of all further nodes.

The leader claims the run, watches all ranks, and decides how the attempt has ended. Every other node starts its ranks and
follows the leader's announcements. A single node leads.
"""

import time
from collections.abc import Mapping

from dlac_pipeline.elastic.nodes.node_heartbeat import NodeHeartbeat
from dlac_pipeline.elastic.rank_assignment import Member, RoundPlan, Share
from dlac_pipeline.elastic.sealed_store import Message

RESUME, VERDICT = "resume", "verdict"
"""Announcements of a leader: the resume point, and the end of the attempt."""
LEADER = 0
_EACH_BEAT = ("now", "progress", "in_hand")
"""Parts of a message that always change: they wait for the next beat."""
_POLL_S = 0.02
_PART_S = 5.0


class Round:
    """Nodes of one attempt, by their places."""

    def __init__(self, share: Share, *, plan: RoundPlan | None = None, heartbeat: NodeHeartbeat | None = None) -> None:
        """`share` is this node's. A single node has neither plan nor heartbeat."""
        self.share = share
        self.leads = share.node == LEADER
        self.number = 0 if plan is None else plan.number
        self.members: Mapping[int, Member] = {} if plan is None else {member.place: member for member in plan.members}
        """Nodes by place. A node that does not lead knows the leader, itself and its buddy. A single node knows none."""
        self.hosts = {place: member.offer.host for place, member in self.members.items()}
        self.others = [place for place in range(share.nodes) if place != share.node]
        self._heartbeat = heartbeat
        self._message: Message = {}

    @property
    def could_grow(self) -> bool:
        """True if nodes wait with which more ranks would train. Known to the leader."""
        return self._heartbeat is not None and self._heartbeat.leadership.could_grow

    @property
    def cut_off(self) -> bool:
        """True if this node has reached no other for too long, or another round has begun."""
        return self._heartbeat is not None and self._heartbeat.round.cut_off

    @property
    def looks(self) -> int:
        """A number that changes whenever this node's knowledge of the round does. 0: a single node."""
        return 0 if self._heartbeat is None else self._heartbeat.connection.looks

    def lost_nodes(self) -> list[int]:
        """Return the places of nodes that have been silent for too long. A node that does not lead watches the leader only."""
        beat = self._heartbeat
        watched = self.others if self.leads else [LEADER]
        return [] if beat is None else [place for place in watched if beat.round.is_lost(self.members[place].slot)]

    def fill_place(self, place: int) -> bool:
        """Give the place of a lost node to a node that waits, as the leader. Return False if none does."""
        member = None if self._heartbeat is None else self._heartbeat.leadership.fill_place(place)
        if member is not None:
            self.members = {**self.members, place: member}
            self.hosts[place] = member.offer.host
        return member is not None

    def publish(self, message: Message) -> None:
        """Replace this node's message: to the leader, or, from the leader, to all."""
        before, self._message = self._message, message
        is_news = any(before.get(name) != message[name] for name in message if name not in _EACH_BEAT)
        if self._heartbeat is not None:
            self._heartbeat.publish(message, hurry=is_news)

    def message_of(self, place: int) -> Message:
        """Return the last message of another node. Empty: none yet."""
        assert self._heartbeat is not None, "there is another node"
        return self._heartbeat.round.message_of(self.members[place].slot)

    def silent_s(self, place: int) -> float:
        """Return for how many seconds another node has written nothing new."""
        assert self._heartbeat is not None, "there is another node"
        return self._heartbeat.round.silent_s(self.members[place].slot)

    def wait(self, within_s: float) -> None:
        """Wait until this node has read something new, so long at most."""
        if self._heartbeat is None:
            time.sleep(within_s)
        else:
            self._heartbeat.connection.wait_for_news(within_s)

    def announce(self, subject: str, message: Message) -> None:
        """Announce something to all nodes, as the leader. The last message of a subject counts."""
        if self._heartbeat is not None:
            self._heartbeat.leadership.announce(subject, message)

    def announced(self, subject: str) -> Message | None:
        """Return the leader's announcement."""
        return None if self._heartbeat is None else self._heartbeat.round.announcements.get(subject)

    def acknowledge(self) -> None:
        """Publish that this node has received the verdict."""
        self.publish({**self._message, "parted": True})

    def part(self) -> None:
        """Wait until all have received the verdict after which this node exits: the store goes with the node that serves it."""
        self.acknowledge()
        deadline = time.monotonic() + _PART_S
        awaited = self.others if self.leads else [LEADER]
        while time.monotonic() < deadline and not all(self._has_parted(place) for place in awaited):
            time.sleep(_POLL_S)

    def _has_parted(self, place: int) -> bool:
        beat, slot = self._heartbeat, self.members[place].slot
        assert beat is not None, "there is another node"
        moved_on = self.leads and beat.round.has_moved_on(slot)
        return beat.round.is_lost(slot) or moved_on or bool(beat.round.message_of(slot).get("parted"))

    def close(self) -> None:
        """End the part of this node in the round."""
        if self._heartbeat is not None:
            self._heartbeat.round.end()
