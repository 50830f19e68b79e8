"""What the machines of a round tell each other, a few times a second, through its store.

A thread writes what this machine says and reads what the others say, so that a network which has gone silent blocks nobody. Only
this machine's own clock counts: for how long it has heard nothing new while it could hear.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dlac_pipeline.ranks.watched_time import watched_time

if TYPE_CHECKING:  # a machine alone needs no PyTorch
    from torch.distributed import Store  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

Words = dict[str, Any]
_EVERY_S = 0.25
_LAST_WORDS_S = 1.0
_WAITING_EVERY = 8
"""Looks for machines that wait are dearer: the rendezvous' whole state is read."""


class EndedElsewhere(Exception):
    """The machines that trained have ended the run, and said how."""

    def __init__(self, words: Words) -> None:
        super().__init__(words)
        self.words = words


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """Who met."""

    index: int
    """This machine's place."""
    count: int
    store: Store
    """Of this round alone."""
    waiting: Callable[[], int]
    """How many machines wait for the next round; blocks as the store does."""
    address: str
    """At which the others reach this machine."""


@dataclass(slots=True)
class _Heard:
    words: Words = field(default_factory=dict)
    at: float = 0.0


class Talk:
    """Of one machine in one round. Every machine has words that it says again and again, and things that it tells once."""

    def __init__(self, round_: Round, words: Words, *, patience_s: float) -> None:
        """`words` are said at first."""
        self._round = round_
        self._words = words
        self._patience_s = patience_s
        self._once: dict[str, str] = {}
        self._heard = {index: _Heard(at=watched_time()()) for index in range(round_.count) if index != round_.index}
        self._told: dict[str, Words] = {}
        self._wanted: set[str] = set()
        self._now = watched_time()
        self._spoke_at = self._now()
        self._beat = 0
        self._ends = threading.Event()
        self._hurries = threading.Event()
        self._lock = threading.Lock()
        self.waiting = 0
        """Machines that wait for the next round."""
        self._thread = threading.Thread(target=self._go_on, daemon=True)
        self._thread.start()

    @property
    def cut_off(self) -> bool:
        """Whether the store has not answered for too long."""
        with self._lock:
            return self._spoke_at < self._now() - self._patience_s

    def say(self, words: Words) -> None:
        """Change this machine's words; JSON."""
        with self._lock:
            self._words = words

    def tell(self, subject: str, words: Words) -> None:
        """Say something once, to all; the last thing told of a subject stands."""
        with self._lock:
            self._once[subject] = json.dumps(words)
        self._hurries.set()

    def told(self, subject: str) -> Words | None:
        """What somebody has told of a subject; asked for once, it is listened for from then on."""
        with self._lock:
            self._wanted.add(subject)
            return self._told.get(subject)

    def words(self, index: int) -> Words:
        """What another machine said last; nothing yet: empty."""
        with self._lock:
            return self._heard[index].words

    def silent_s(self, index: int) -> float:
        """For how long another machine has said nothing new."""
        with self._lock:
            return self._now() - self._heard[index].at

    def lost(self, index: int) -> bool:
        """Whether another machine has been silent for too long, while the store answered."""
        with self._lock:
            return self._heard[index].at < self._spoke_at - self._patience_s

    def end(self) -> None:
        """Say no more than what is to be told yet; a thread that waits for a silent network is left behind."""
        self._ends.set()
        self._hurries.set()
        self._thread.join(_LAST_WORDS_S)

    def _go_on(self) -> None:
        while not self._ends.is_set():
            self._hurries.clear()
            with suppress(
                RuntimeError, OSError, ValueError
            ):  # the store is gone, or has words of strangers: `cut_off` says so
                self._speak()
                self._listen()
                with self._lock:
                    self._spoke_at = self._now()
            self._hurries.wait(_EVERY_S)
        if self._once:
            with suppress(RuntimeError, OSError):
                self._speak()

    def _speak(self) -> None:
        self._beat += 1
        with self._lock:
            words = {**self._words, "beat": self._beat}
            once = dict(self._once)
        self._round.store.set(_said_by(self._round.index), json.dumps(words))
        for subject, text in once.items():
            self._round.store.set(subject, text)
        with self._lock:
            self._once = {subject: text for subject, text in self._once.items() if once.get(subject) != text}

    def _listen(self) -> None:
        store = self._round.store
        there = self._there()
        for index, said in zip(
            there, store.multi_get([_said_by(index) for index in there]) if there else (), strict=True
        ):
            heard, words = self._heard[index], _words_in(said)
            with self._lock:
                if words.get("beat") != heard.words.get("beat"):
                    heard.words, heard.at = words, self._now()
        with self._lock:
            wanted = sorted(self._wanted)
        for subject in wanted:
            if store.check([subject]):
                words = _words_in(store.get(subject))
                with self._lock:
                    self._told[subject] = words
        if self._beat % _WAITING_EVERY == 0:
            self.waiting = self._round.waiting()

    def _there(self) -> list[int]:
        """The machines that have said something; one question to the store once all have."""
        silent = [index for index, heard in self._heard.items() if not heard.words]
        check = self._round.store.check
        if silent and not check([_said_by(index) for index in silent]):
            silent = [index for index in silent if not check([_said_by(index)])]
            return [index for index in self._heard if index not in silent]
        return [*self._heard]


def _words_in(said: bytes) -> Words:
    """Return the words of a node.

    Raises:
        ValueError: these are no words of a node.
    """
    words = json.loads(said)
    if not isinstance(words, dict):
        raise ValueError(f"expected words, found {type(words).__name__}")
    return words


def _said_by(index: int) -> str:
    return f"said/{index}"
