"""What strikes when: from a seed and a number of faults to the whole campaign, decided before it begins."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

_WHILE_RECOVERING = 0.5
"""Share of the faults that can, which strike while the one before is still being recovered from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind of fault, and what must be seen before it is healed."""

    says: str
    """What is done, for people."""
    weight: int = 1
    """How often it is drawn, beside others."""
    new_attempt: bool = True
    """Whether an attempt must have followed."""
    sensors: bool = False
    """Whether Dagster's sensors must have looked again."""
    every_run: bool = False
    """Whether it strikes all runs, and not one."""
    follows: bool = False
    """Whether it may strike while a recovery is under way."""


KINDS = {
    "rank killed": Kind(says="SIGKILL of a rank", weight=4, follows=True),
    "all ranks killed": Kind(says="SIGKILL of all ranks at once", weight=2, follows=True),
    "rank stopped": Kind(says="SIGSTOP of a rank: it hangs", weight=2),
    "fork server killed": Kind(says="SIGKILL of the process that the ranks are forked from", follows=True),
    "supervisor killed": Kind(says="SIGKILL of the supervisor", weight=2, follows=True),
    "run worker killed": Kind(says="SIGKILL of the Dagster run's process", weight=2, follows=True),
    "code server killed": Kind(says="SIGKILL of Dagster's code server", new_attempt=False, sensors=True),
    "daemon killed": Kind(
        says="SIGKILL of Dagster's daemon, which is started again 2 s later",
        new_attempt=False,
        sensors=True,
        follows=True,
    ),
    "everything killed": Kind(
        says="SIGKILL of daemon, code server, run workers, supervisors and ranks of all runs; the daemon is started again",
        sensors=True,
        every_run=True,
    ),
    "rank preempted": Kind(says="SIGUSR1 to a rank: a preemption"),
    "supervisor preempted": Kind(says="SIGTERM to the supervisor: a preemption"),
    "run worker preempted": Kind(says="SIGTERM to the Dagster run's process"),
    "checkpoint deleted": Kind(says="a file of the newest checkpoint is deleted, and all ranks are killed", weight=2),
    "checkpoint flipped": Kind(says="a bit of the newest checkpoint is flipped, and all ranks are killed", weight=2),
    "store full": Kind(says="no byte is free in the checkpoint store for 8 s", every_run=True),
    "catalog locked": Kind(says="another process holds the catalog's lock for 8 s", new_attempt=False),
    "catalog away": Kind(says="the catalog's file is missing for 8 s, during which a rank is killed"),
    "launch stopped": Kind(
        says="SIGSTOP of everything from the Dagster run's process down to the ranks; SIGCONT once another has taken over"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One fault to come."""

    number: int
    kind: str
    moment: float
    """When it is due, as a share of the campaign's time."""
    run: int
    """Which of the runs that train beside each other it strikes."""
    follows: bool
    """Whether it strikes while the one before is being recovered from, and the same run."""
    seed: int
    """Of what is left to chance when it strikes."""


def choose(seed: int, faults: int, *, runs: int, without: Collection[str] = ()) -> list[Choice]:
    """The faults of a campaign in order: every kind once, as far as the number goes, then kinds by their weights.

    Args:
        seed: the same one chooses the same.
        faults: how many.
        runs: how many runs train beside each other.
        without: kinds that cannot be done here.
    """
    chance = random.Random(seed)
    kinds = [name for name in KINDS if name not in without]
    drawn = chance.sample(kinds, min(faults, len(kinds)))
    weights = [KINDS[name].weight for name in kinds]
    drawn += chance.choices(kinds, weights, k=faults - len(drawn))
    chance.shuffle(drawn)
    chosen: list[Choice] = []
    for number, kind in enumerate(drawn, start=1):
        before = chosen[-1] if chosen else None
        follows = _may_follow(kind, before) and chance.random() < _WHILE_RECOVERING
        run = before.run if follows and before is not None else chance.randrange(runs)
        moment = (number - 1 + chance.random()) / faults
        chosen.append(
            Choice(number=number, kind=kind, moment=moment, run=run, follows=follows, seed=chance.randrange(2**32))
        )
    return chosen


def _may_follow(kind: str, before: Choice | None) -> bool:
    """No more than two at once: three attempts in a row without a checkpoint are the end of a run."""
    return before is not None and not before.follows and KINDS[kind].follows and KINDS[before.kind].new_attempt
