"""The machines of one attempt, as one of them sees it: its share of the ranks, who leads, what the others say.

The leader (the machine that has heard of the latest attempt) claims the run, tells the others where it resumes, watches all
ranks, and decides how the attempt has ended; the others start their ranks and do as it says. A machine by itself leads nobody.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from types import TracebackType

from catalog.errors import SpecInvalid
from dlac_pipeline.nodes.shares import Offer, placed, shares, usable_ranks
from dlac_pipeline.nodes.talk import Round, Talk, Words
from dlac_pipeline.ranks.share import Share

RESUME, VERDICT = "resume", "verdict"
"""What a leader tells: where the attempt resumes, and how it has ended."""
LEADER = 0
"""Its place."""
_MEETING = "meeting"
_POLL_S = 0.02
_PART_S = 5.0


class CutOff(Exception):
    """The store of the round does not answer any more."""


class Crew:
    """Of one attempt, by their places; a context manager."""

    def __init__(
        self,
        mine: Share,
        *,
        all_shares: Sequence[Share] = (),
        offers: Sequence[Offer] = (),
        places: Sequence[int] = (),
        talk: Talk | None = None,
        batch_size: int = 1,
    ) -> None:
        """`offers` and `all_shares` by place; `places`: what machines are called in `talk`, by place."""
        self.share = mine
        self.shares = all_shares or (mine,)
        self.hosts = [offer.host for offer in offers] or [socket.gethostname()]
        self._offers = offers
        self._places = places
        self._talk = talk
        self._batch_size = batch_size
        self._words: Words = {}

    @property
    def leads(self) -> bool:
        """Whether this machine leads."""
        return self.share.node == LEADER

    @property
    def others(self) -> list[int]:
        """The places of the other machines."""
        return [place for place in range(len(self.shares)) if place != self.share.node]

    @property
    def could_grow(self) -> bool:
        """Whether machines wait with which there would be more ranks, if they are like this one."""
        if self._talk is None or not self._talk.waiting:
            return False
        offered = sum(offer.ranks for offer in self._offers) + self._talk.waiting * self._offers[self.share.node].ranks
        return usable_ranks(self._batch_size, offered) > self.share.world_size

    @property
    def cut_off(self) -> bool:
        """Whether this machine has heard nobody at all for too long."""
        return self._talk is not None and self._talk.cut_off

    def lost(self) -> list[int]:
        """The places of machines that have been silent for too long."""
        return [] if self._talk is None else [place for place in self.others if self._talk.lost(self._places[place])]

    def say(self, words: Words) -> None:
        """Say this again and again, in the place of what was said before."""
        self._words = words
        if self._talk is not None:
            self._talk.say({"offer": asdict(self._offers[self.share.node]), **words})

    def words(self, place: int) -> Words:
        """What another machine said last."""
        assert self._talk is not None, "there is another machine"
        return self._talk.words(self._places[place])

    def silent_s(self, place: int) -> float:
        """For how long it has said nothing new."""
        assert self._talk is not None, "there is another machine"
        return self._talk.silent_s(self._places[place])

    def tell(self, subject: str, words: Words) -> None:
        """Say something once; what is told of a subject last stands."""
        if self._talk is not None:
            self._talk.tell(subject, words)

    def told(self, subject: str) -> Words | None:
        """What was told of it."""
        return None if self._talk is None else self._talk.told(subject)

    def has_heard(self) -> None:
        """Say that this machine has heard the verdict."""
        self.say({**self._words, "parted": True})

    def part(self) -> None:
        """Wait until all have heard the verdict behind which this machine leaves: the store goes with who serves it."""
        self.has_heard()
        deadline = time.monotonic() + _PART_S
        while time.monotonic() < deadline:
            lost = self.lost()
            if all(place in lost or self.words(place).get("parted") for place in self.others):
                break
            time.sleep(_POLL_S)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._talk is not None:
            self._talk.end()


def agreed(met: Round, offer: Offer, *, batch_size: int, patience_s: float) -> Crew | None:
    """Who takes which ranks, known to all; None if a machine was lost meanwhile, and all must meet again.

    Raises:
        CutOff: this machine hears nobody, and must meet them through another connection.
        SpecInvalid: another one would train something else.
    """
    talk = Talk(met, {"offer": asdict(offer)}, patience_s=patience_s)
    others = [index for index in range(met.count) if index != met.index]
    while not all("offer" in talk.words(index) for index in others):
        if _deserted(talk, others):
            return None
    offers = [offer if index == met.index else Offer(**talk.words(index)["offer"]) for index in range(met.count)]
    _check_alike(offer, offers)
    places = placed(offers)
    if met.index == places[LEADER]:
        talk.tell(_MEETING, {"port": free_port()})
    while (meeting := talk.told(_MEETING)) is None:
        if _deserted(talk, others):
            return None
    found = shares(offers, batch_size=batch_size, port=meeting["port"])
    return Crew(
        found[met.index],
        all_shares=[found[index] for index in places],
        offers=[offers[index] for index in places],
        places=places,
        talk=talk,
        batch_size=batch_size,
    )


def _deserted(talk: Talk, others: Sequence[int]) -> bool:
    time.sleep(_POLL_S)
    if talk.cut_off or any(talk.lost(index) for index in others):
        talk.end()
        if talk.cut_off:
            raise CutOff
        return True
    return False


def _check_alike(mine: Offer, offers: Sequence[Offer]) -> None:
    others = [offer.host for offer in offers if offer.config != mine.config]
    if others:
        raise SpecInvalid(
            f"expected the same training job on all nodes, found another one on {', '.join(others)} than on {mine.host}: start "
            "all with the same job spec (sources, order, params), script and arguments"
        )


def free_port() -> int:
    """A port that nobody listens on, on any of this machine's addresses."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        return int(listener.getsockname()[1])
