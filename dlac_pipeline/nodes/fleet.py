"""All ranks of an attempt, those of other machines among them, as the leader sees them; what another machine says of its own.

What ranks elsewhere write in their launch folder is brought into the leader's: signs of life by its clock, batches in hand.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, replace

from dlac_pipeline.nodes.crew import Crew
from dlac_pipeline.nodes.talk import Words
from dlac_pipeline.ranks.group import Exit, RankGroup
from dlac_pipeline.ranks.launch_folder import in_hand_file
from dlac_pipeline.ranks.progress import Progress, read_progress, read_record, write_record

LOST = "NodeLost"
"""Kind of the failure of the ranks of a machine that gives no sign of life."""
ASKS, ANSWERS = "asks", "answers"
"""A leader's word that something has broken; and that what a machine says was put together behind it."""
LEAVE, STOP = "leave", "stop"
"""What a machine may be asked: to leave the run to the others, or to stop it."""


class Fleet:
    """The ranks of an attempt; `own` are this machine's."""

    def __init__(self, own: RankGroup, crew: Crew) -> None:
        self.folder = own.folder
        self.started_at = own.started_at
        self.ask_to_stop = own.ask_to_stop
        self.end = own.end
        self.kept_errors = own.kept_errors
        self._own = own
        self._crew = crew
        self._beats: dict[int, int] = {}
        self._later_s: dict[int, float] = {}
        self._records: dict[str, str] = {}
        self._asks = False
        self._last_words: dict[int, dict[str, str]] = {}

    @property
    def pids(self) -> list[int]:
        """Process ids of this machine's ranks; waits until all have started."""
        return self._own.pids

    @property
    def started(self) -> bool:
        """Whether those are known by now."""
        return self._own.started

    @property
    def noticed(self) -> bool:
        """Whether a rank of this machine has been told to leave, whoever told it."""
        return self._own.noticed

    @property
    def leaving(self) -> list[str]:
        """The other machines that have been told to leave."""
        return [self._crew.hosts[place] for place in self._crew.others if self._crew.words(place).get("asked") == LEAVE]

    @property
    def asked_to_stop(self) -> bool:
        """Whether another machine was told to stop the run."""
        return any(self._crew.words(place).get("asked") == STOP for place in self._crew.others)

    def progress(self) -> list[Progress | None]:
        """Last sign of life of each rank."""
        for place in self._crew.others:
            self._bring(self._crew.words(place), place)
        return [read_progress(self.folder, rank) for rank in range(self._crew.share.world_size)]

    def failures(self) -> list[Exit]:
        """Ranks that ended badly, once all machines have been heard of it: what broke here may have begun elsewhere."""
        found = [*self._lost(), *self._own.failures()]
        for place in self._crew.others:
            found += [self._told(failure, place) for failure in self._crew.words(place).get("failures", ())]
        if not found:
            return []
        if not self._asks:
            self._asks = True
            self._crew.say({ASKS: True})
        return [] if self._waits_for_words() else found

    def all_exited(self) -> bool:
        """Whether no rank is running."""
        others = (self._crew.words(place).get("exited", False) for place in self._crew.others)
        return self._own.all_exited() and all(others)

    def last_words(self, rank: int) -> dict[str, str]:
        """Where a rank's log is, and how it ends."""
        return self._own.last_words(rank) if rank in self._own.ranks else self._last_words.get(rank, {})

    def _lost(self) -> list[Exit]:
        """The first rank of each machine that is lost; ahead of all that follows from it."""
        if self._crew.cut_off:
            return [Exit(rank=0, code=1, kind=LOST, message="this node has lost the rendezvous", at=0.0)]
        found = []
        for place in self._crew.lost():
            share, host = self._crew.shares[place], self._crew.hosts[place]
            silent_s = self._crew.silent_s(place)
            which = f"node {host} ({share.ranks} ranks) gave no sign of life for {silent_s:.0f} s"
            if share.ranks:
                found.append(Exit(rank=share.first_rank, code=1, kind=LOST, message=which, at=0.0))
        return found

    def _waits_for_words(self) -> bool:
        """Whether another machine can still say what it knew when it was asked, for something had broken."""
        if self._crew.cut_off:
            return False
        lost = self._crew.lost()
        return any(not self._crew.words(place).get(ANSWERS) for place in self._crew.others if place not in lost)

    def _told(self, failure: Words, place: int) -> Exit:
        self._last_words[failure["exit"]["rank"]] = failure["last_words"]
        exit_ = Exit(**failure["exit"])
        return replace(exit_, at=exit_.at + self._later_s.get(place, 0.0))

    def _bring(self, words: Words, place: int) -> None:
        if "progress" not in words or self._beats.get(place) == words["beat"]:
            return
        self._beats[place] = words["beat"]
        later_s = self._later_s[place] = time.time() - words["now"]
        with suppress(OSError):  # a disk that is full or away for a moment; the next words bring it
            for rank, record in words["progress"].items():
                if (
                    self._records.get(rank) != record
                ):  # written again with another estimate, it would look like a new sign
                    write_record(self.folder, int(rank), bytes.fromhex(record), later_s=later_s)
                    self._records[rank] = record
            for rank, text in words["in_hand"].items():
                in_hand_file(self.folder, int(rank)).write_text(text)


def words_of(ranks: RankGroup, *, asked: str, answers: bool) -> Words:
    """What a machine that is led says of its ranks, for `Fleet`; `answers` if the leader had asked before."""
    records = {rank: read_record(ranks.folder, rank) for rank in ranks.ranks}
    failures = ranks.failures()
    in_hand = {rank: in_hand_file(ranks.folder, rank) for rank in ranks.ranks}
    return {
        "now": time.time(),
        "progress": {rank: record.hex() for rank, record in records.items() if record},
        "in_hand": {rank: path.read_text(errors="replace") for rank, path in in_hand.items() if path.exists()},
        "failures": [{"exit": asdict(exit_), "last_words": ranks.last_words(exit_.rank)} for exit_ in failures],
        "exited": ranks.all_exited(),
        "asked": asked,
        ANSWERS: answers,
    }
