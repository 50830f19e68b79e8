"""All ranks of an attempt on all nodes, as the leader sees them, and the report of another node on its ranks.

Heartbeats and batches in hand of other nodes' ranks are copied to the leader's launch folder, in the leader's clock.
"""

import time
from contextlib import suppress
from dataclasses import asdict, replace

from dlac_pipeline.elastic.ranks.launch_folder import in_hand_file
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.elastic.sealed_store import Message
from dlac_pipeline.supervise.liveness.heartbeat import RankHeartbeat, read_heartbeat, read_record, write_record
from dlac_pipeline.supervise.ranks.local_ranks import Exit, RankGroup

LOST = "NodeLost"
"""Kind of the failure of the ranks of a node whose heartbeat stopped."""
REQUESTS_REPORTS, ANSWERS_REQUEST = "asks", "answers"
"""Messages: the leader's request after a failure, and a node's mark that it made its report after it read that request."""
LEAVE, STOP = "leave", "stop"
"""Requests of a person or a scheduler to a node: to leave the run to the other nodes, or to stop it."""


class AllRanks:
    """The ranks of an attempt. `own` are those of this node."""

    def __init__(self, own: RankGroup, round_: Round) -> None:
        self.own = own
        self._round = round_
        self._looks = -1
        self._messages: dict[int, Message] = {}
        """Messages of the other nodes by place, as of the last read of the store, with the next two."""
        self._lost_places: list[int] = []
        self._heartbeats: dict[int, RankHeartbeat] = {}
        self._beats: dict[int, int] = {}
        self._later_s: dict[int, float] = {}
        self._records: dict[str, str] = {}
        self._requested_reports = False
        self._log_ends: dict[int, dict[str, str]] = {}

    @property
    def leaving_nodes(self) -> list[str]:
        """Names of the other nodes that were asked to leave."""
        places = (place for place, message in self._read_messages().items() if message.get("asked") == LEAVE)
        return [self._round.hosts[place] for place in places]

    @property
    def stop_requested(self) -> bool:
        """True if another node was asked to stop the run."""
        return any(message.get("asked") == STOP for message in self._read_messages().values())

    @property
    def silent_ranks(self) -> set[int]:
        """Ranks of lost nodes, whose last heartbeats are old."""
        places = self._round.others if self._round.cut_off else self._lost_places
        nodes = [self._round.members[place] for place in places]
        return {rank for node in nodes for rank in range(node.first_rank, node.first_rank + node.ranks)}

    def heartbeats(self) -> list[RankHeartbeat | None]:
        """Return the last heartbeat of each rank."""
        self._read_messages()
        own = {rank: read_heartbeat(self.own.folder, rank) for rank in self.own.ranks}
        known = {**self._heartbeats, **own}
        return [known.get(rank) for rank in range(self._round.share.world_size)]

    def failures(self) -> list[Exit]:
        """Return the failed ranks once all nodes have reported. A failure here may be the effect of one on another node."""
        found = self._known_failures()
        if not found:
            return []
        if not self._requested_reports:
            self._requested_reports = True
            self._round.publish({REQUESTS_REPORTS: True})
        awaited = {} if self._round.cut_off else self._read_messages()
        lost = self._lost_places
        has_all = all(message.get(ANSWERS_REQUEST) for place, message in awaited.items() if place not in lost)
        return found if has_all else []

    def _known_failures(self) -> list[Exit]:
        """Return the failures that are known now. A lost node may report again, and is then no failure any more."""
        found = [*self._lost_ranks(), *self.own.failures()]
        for place, message in self._read_messages().items():
            for failure in message.get("failures", ()):
                self._log_ends[failure["exit"]["rank"]] = failure["log_end"]
                exit_ = Exit(**failure["exit"])
                found.append(replace(exit_, at=exit_.at + self._later_s.get(place, 0.0)))
        return found

    def all_exited(self) -> bool:
        """Return True if no rank is running, and none has failed. A failure counts before all nodes have reported."""
        exited = self.own.all_exited() and all(m.get("exited", False) for m in self._read_messages().values())
        return exited and not self._known_failures()

    def log_end(self, rank: int) -> dict[str, str]:
        """Return the path of a rank's log, and its last lines."""
        return self.own.log_end(rank) if rank in self.own.ranks else self._log_ends.get(rank, {})

    def _read_messages(self) -> dict[int, Message]:
        """Return the last messages of the other nodes. Process them once per read of the store, because they are many."""
        looks = self._round.looks
        if looks != self._looks:
            self._looks = looks
            self._messages = {place: self._round.message_of(place) for place in self._round.others}
            self._lost_places = self._round.lost_nodes()
            for place, message in self._messages.items():
                self._copy_heartbeats(message, place)
        return self._messages

    def _lost_ranks(self) -> list[Exit]:
        """Return the first rank of each lost node. It sorts before the failures that follow from the loss."""
        if self._round.cut_off:
            return [Exit(rank=0, code=1, kind=LOST, message="this node has lost the rendezvous", at=0.0)]
        self._read_messages()
        found = []
        for place in self._lost_places:
            node = self._round.members[place]
            silent_s = self._round.silent_s(place)
            which = f"node {self._round.hosts[place]} ({node.ranks} ranks) sent no heartbeat for {silent_s:.0f} s"
            if node.ranks:
                found.append(Exit(rank=node.first_rank, code=1, kind=LOST, message=which, at=0.0))
        return found

    def _copy_heartbeats(self, message: Message, place: int) -> None:
        if "progress" not in message or self._beats.get(place) == message["beat"]:
            return
        self._beats[place] = message["beat"]
        later_s = self._later_s[place] = time.time() - message["now"]
        # the disk may be full or unavailable for a moment; the next message repeats the records
        with suppress(OSError):
            for rank, record in message["progress"].items():
                # A record that is written again with another estimate would look like a new heartbeat.
                if self._records.get(rank) != record:
                    write_record(self.own.folder, int(rank), bytes.fromhex(record), later_s=later_s)
                    self._records[rank] = record
                    found = read_heartbeat(self.own.folder, int(rank))
                    if found is not None:
                        self._heartbeats[int(rank)] = found
            for rank, text in message["in_hand"].items():
                in_hand_file(self.own.folder, int(rank)).write_text(text)


def report_of(ranks: RankGroup, *, asked: str, answers: bool) -> Message:
    """Return a node's report on its ranks, for `AllRanks`. `answers`: the node had read the leader's request before."""
    records = {rank: read_record(ranks.folder, rank) for rank in ranks.ranks}
    exited = ranks.all_exited()  # asked first: a rank that dies between the two questions is a failure
    failures = ranks.failures()
    in_hand = {rank: in_hand_file(ranks.folder, rank) for rank in ranks.ranks}
    return {
        "now": time.time(),
        "progress": {rank: record.hex() for rank, record in records.items() if record},
        "in_hand": {rank: path.read_text(errors="replace") for rank, path in in_hand.items() if path.exists()},
        "failures": [{"exit": asdict(exit_), "log_end": ranks.log_end(exit_.rank)} for exit_ in failures],
        "exited": exited,
        "asked": asked,
        ANSWERS_REQUEST: answers,
    }
