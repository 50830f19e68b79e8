"""Faults to inject: their kinds, their notation on the command line, and their choice by a seed."""

import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count

from dlac_pipeline.lakehouse.errors import SpecInvalid


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKind:
    """A kind of fault, and the conditions of its healing."""

    description: str
    """A description for people."""
    new_attempt: bool = True
    """True if a new attempt must follow."""
    follows: bool = False
    """True if it may strike during a recovery."""
    survived: bool = False
    """True if replica groups survive it without a new attempt."""


RANK = FaultKind(description="SIGKILL of a rank", follows=True, survived=True)
RANKS = FaultKind(description="SIGKILL of all ranks at once", follows=True)
HANG = FaultKind(description="SIGSTOP of a rank: it hangs", survived=True)
SUPERVISOR = FaultKind(description="SIGKILL of the supervisor", follows=True)
PREEMPT = FaultKind(description="SIGTERM to the supervisor: a preemption")
DAMAGE = FaultKind(
    description="a bit of the newest checkpoint is flipped, its states in memory are lost, and all ranks are killed"
)
KINDS = {
    "rank": RANK,
    "ranks": RANKS,
    "hang": HANG,
    "node": FaultKind(
        description="SIGKILL of a supervisor and its ranks, whose states in memory are lost", follows=True
    ),
    "supervisor": SUPERVISOR,
    "preempt": PREEMPT,
    "checkpoint": DAMAGE,
    "store": FaultKind(description="the checkpoint store is unavailable", new_attempt=False),
    "catalog": FaultKind(description="the catalog is unavailable", new_attempt=False),
    "network": FaultKind(description="connections to catalog and store are cut, or silent", new_attempt=False),
}
"""Kinds of `dlac chaos` by name."""
OWN_KINDS = ("rank", "ranks", "hang", "node", "supervisor", "preempt", "checkpoint")
"""Kinds that touch the run's own processes and files only."""
_SECONDS = {"": 1.0, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|min|h|)")
_KILL = re.compile(r"([a-z]+)(?::([0-9]{1,9}))?@(?:step=([0-9]{1,12})|(.+))")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedFault:
    """A fault that is due at a step, or after some seconds."""

    kind: str
    at_step: int | None = None
    at_s: float = 0.0
    """Seconds after the run's first step, if no step is named. Drawn faults: seconds since the run trains without a fault."""
    rank: int | None = None
    """Rank to strike. Unset: the seed chooses."""
    seed: int = 0
    """Seed of the choices at the strike."""
    is_listed: bool = False
    """True if a person asked for it. Then it has to strike."""

    def is_due(self, step: int, seconds: float) -> bool:
        """Return True if it is due when a run has finished `step`, and `seconds` have passed."""
        return seconds >= self.at_s if self.at_step is None else step >= self.at_step


class Schedule:
    """Faults that wait until they are due: listed ones, and ones that are drawn in turn."""

    def __init__(self, listed: Sequence[PlannedFault] = (), drawn: Iterable[PlannedFault] = ()) -> None:
        self.listed = list(listed)
        """Listed faults that wait."""
        self._drawn = iter(drawn)
        self._next = next(self._drawn, None)

    @property
    def is_over(self) -> bool:
        """True if no fault waits."""
        return not self.listed and self._next is None

    def take_due(self, step: int, *, trained_s: float, healthy_s: float) -> PlannedFault | None:
        """Remove and return a fault that is due, or return None.

        `trained_s`: seconds since the first step. `healthy_s`: those since then and since the last fault was healed.
        """
        due = next((fault for fault in self.listed if fault.is_due(step, trained_s)), None)
        if due is not None:
            self.listed.remove(due)
        elif self._next is not None and self._next.is_due(step, healthy_s):
            due, self._next = self._next, next(self._drawn, None)
        return due


def parse_seconds(text: str) -> float:
    """Return the seconds of a duration such as 60s, 1.5m or 500ms. Raise `SpecInvalid` for another text."""
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _SECONDS[found[2]] if found else 0.0
    if not 0 < seconds <= 86_400:
        raise SpecInvalid(f"expected a duration of up to a day, such as 60s, 5m or 1h, found {text!r}: correct it")
    return seconds


def parse_kill(text: str, *, seed: int = 0) -> PlannedFault:
    """Return the fault of a text such as rank@step=120, rank:1@step=120 or supervisor@60s. Raise `SpecInvalid` for others."""
    found = _KILL.fullmatch(text.strip())
    if found is None:
        raise SpecInvalid(
            f"expected a fault as KIND@step=N or KIND@60s, such as rank@step=120, rank:1@step=120 or supervisor@60s, found "
            f"{text!r}: correct it"
        )
    kind, rank, step, after = found.groups()
    check_kinds([kind])
    if rank is not None and kind not in ("rank", "hang"):
        raise SpecInvalid(f"expected a number of a rank after rank: or hang: only, found {text!r}: write {kind}@...")
    if step is not None and int(step) == 0:
        raise SpecInvalid(f"expected a step from 1, found {text!r}: name the step after which the fault strikes")
    return PlannedFault(
        kind=kind,
        at_step=None if step is None else int(step),
        at_s=0.0 if after is None else parse_seconds(after),
        rank=None if rank is None else int(rank),
        seed=seed,
        is_listed=True,
    )


def check_kinds(kinds: Sequence[str]) -> None:
    """Raise `SpecInvalid` unless each is the name of a kind."""
    for kind in kinds:
        if kind not in KINDS:
            raise SpecInvalid(f"expected a kind of fault, one of {', '.join(KINDS)}, found {kind!r}: name one of these")


def draw_faults(kinds: Sequence[str], *, every_s: float, seed: int, faults: int | None) -> Iterator[PlannedFault]:
    """Yield faults at random times with the mean `every_s` between them. The same seed draws the same kinds, targets and times.

    `faults` is the greatest number of them. None: without end.
    """
    chance = random.Random(seed)
    for _ in count() if faults is None else range(faults):
        kind, at_s = chance.choice(kinds), chance.expovariate(1 / every_s)
        yield PlannedFault(kind=kind, at_s=at_s, seed=chance.randrange(2**32))


def draw_cascade(head: PlannedFault, kinds: Sequence[str], length: int) -> list[PlannedFault]:
    """Return the faults that strike during the recovery from `head`, in a cascade of `length`. Only some of `kinds` may."""
    chance = random.Random(head.seed)
    following = [kind for kind in kinds if KINDS[kind].follows] or ["rank"]
    return [PlannedFault(kind=chance.choice(following), seed=chance.randrange(2**32)) for _ in range(length - 1)]
