"""Replica groups on several nodes: what the leader and the supervisors of the other nodes tell each other in their messages.

Presence is the lighthouse that a group has reached, or that it is dead. Each supervisor writes the presence of groups elsewhere
to its launch folder, where its own groups read it. The leader also writes the events of a committer elsewhere to its own folder.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from dlac_pipeline.extensions.replicas.rank import DEAD, groups_of, read_lighthouse, write_lighthouse
from dlac_pipeline.extensions.replicas.replica_ranks import ReplicaRanks
from dlac_pipeline.supervise.failure import HangDetector
from dlac_pipeline.supervise.liveness.heartbeat import Phase
from dlac_pipeline.supervise.ranks.all_ranks import LOST, AllRanks
from dlac_pipeline.supervise.ranks.local_ranks import Exit
from dlac_pipeline.supervise.ranks.rank_events import EVENTS_FILE, EventReader

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dlac_pipeline.elastic.round import Round
    from dlac_pipeline.elastic.sealed_store import Message
    from dlac_pipeline.supervise.ranks.rank_events import Event

_EVENTS_SENT = 32
"""Last events of a node's groups in its report. The leader reads several reports a second."""


class FollowedGroups(ReplicaRanks):
    """The replica groups of a node that follows. They are started again while others have the state, for the leader to judge."""

    def __init__(self, *parts: Any, **options: Any) -> None:
        super().__init__(*parts, **options)
        self.note_elsewhere({}, have_state=True, have_ended=False)
        self._events = EventReader(self.folder)
        self._sent: list[Event] = []
        self._hangs = HangDetector(self.launch)

    def heal(self) -> Iterator[Event]:
        """Start dead and hung groups again. One that waits may do so for a hung one elsewhere. Yield events."""
        by_rank = [None] * self.ranks.start + self.heartbeats()  # the detector numbers them
        waiting = [rank for rank, each in enumerate(by_rank) if each is not None and each.phase == Phase.WAITING]
        hung = self._hangs.find_hang(by_rank, gone={*range(self.ranks.start), *self.gone(), *waiting})
        if hung is not None:
            self.outlives_hang(hung)
            self._hangs.forget()
        yield from super().heal()

    def report(self, leader: Message) -> Message:
        """Note the leader's lighthouse, and the presence of all groups elsewhere. Return the report on these groups."""
        found, address = read_lighthouse(self.folder), leader.get("lighthouse", "")
        if address and (found is None or found.address != address):
            write_lighthouse(self.folder, address)
        self.note_elsewhere(leader.get("groups", {}), have_state=True, have_ended=leader.get("have_ended", False))
        self._sent = [*self._sent, *self._events.read_new()][-_EVENTS_SENT:]
        presence = {"groups": self.presence(), "have_state": self.has_state(), "have_ended": self.has_ended()}
        return {**presence, "events": self._sent}


class AllGroups(AllRanks):
    """The replica groups of all nodes, as the leader sees them. The loss of another node ends its groups, and not the attempt."""

    own: ReplicaRanks

    def __init__(self, own: ReplicaRanks, round_: Round) -> None:
        super().__init__(own, round_)
        own.exchange = self._exchange
        self._vacant: set[int] = set()
        """Places of lost nodes that no other node has taken yet."""
        self._late: set[int] = set()
        """Places whose nodes began without the state."""
        self._copied_at: dict[int, float] = {}
        """Moment of the last event that was copied, by the slot of its node."""

    def _exchange(self) -> Iterator[Event]:
        """Exchange news with the other nodes, and replace lost ones. Yield events."""
        reports, own = self._reports(), self.own
        self._copy_events(reports)
        elsewhere = dict(chain.from_iterable(each.get("groups", {}).items() for each in reports.values()))
        elsewhere |= {str(group): DEAD for place in self._lost_places for group in self._groups_of(place)}
        own.note_elsewhere(
            elsewhere,
            have_state=any(each.get("have_state", place not in self._late) for place, each in reports.items()),
            have_ended=any(each.get("have_ended", False) for each in reports.values()),
        )
        own.lost_ranks = self.silent_ranks
        yield from self._replace_lost()
        lighthouse = read_lighthouse(own.folder) if own.lighthouse is not None and own.lighthouse.has_started else None
        news = {"groups": {**elsewhere, **own.presence()}, "have_ended": own.has_ended()}
        self._round.publish({"lighthouse": "" if lighthouse is None else lighthouse.address, **news})

    def failures(self) -> list[Exit]:
        """Return the failed ranks if the attempt cannot continue. The ranks of lost nodes are replaced."""
        if self._round.cut_off:
            return self._lost_ranks()
        failed = self.own.failures()
        for report in self._reports().values():
            for failure in report.get("failures", ()):
                self._log_ends[failure["exit"]["rank"]] = failure["log_end"]
                failed.append(Exit(**failure["exit"]))
        return failed

    def all_exited(self) -> bool:
        """Return True if no rank is running, and none has failed. A node without the state is not waited for at the end."""
        exited = self.own.all_exited() and all(
            each.get("exited", False) for each in self._reports().values() if each.get("have_state", True)
        )
        return exited and not self.failures()

    def _reports(self) -> Mapping[int, Message]:
        """Return the last messages of the nodes that live, by place."""
        messages = self._read_messages()
        return {place: message for place, message in messages.items() if place not in self._lost_places}

    def _replace_lost(self) -> Iterator[Event]:
        for place in [*self._lost_places]:
            if place not in self._vacant:
                self._vacant.add(place)
                message = f"node {self._round.hosts[place]} sent no heartbeat for {self._round.silent_s(place):.0f} s"
                lost, each = Exit(rank=0, code=1, kind=LOST, message=message), self.own.launch.ranks_per_replica
                yield from (
                    self.own.note_lost(group, replace(lost, rank=group * each)) for group in self._groups_of(place)
                )
            if not self.own.ends() and self._round.fill_place(place):
                self._lost_places.remove(place)
                self._vacant.discard(place)
                self._late.add(place)
        self._vacant &= {*self._lost_places}

    def _groups_of(self, place: int) -> range:
        node = self._round.members[place]
        return groups_of(node.first_rank, node.ranks, self.own.launch.ranks_per_replica)

    def _copy_events(self, reports: Mapping[int, Message]) -> None:
        """Write the new events of committers elsewhere to the leader's launch folder."""
        for place, report in reports.items():
            slot = self._round.members[place].slot
            new = [each for each in report.get("events", ()) if each["at"] > self._copied_at.get(slot, 0.0)]
            if new:
                self._copied_at[slot] = new[-1]["at"]
                with (self.own.folder / EVENTS_FILE).open("a") as stream:
                    stream.writelines(json.dumps(event) + "\n" for event in new)
