"""The choice of faults: from a seed and a number of faults to the whole campaign, before it begins."""

import random
from collections.abc import Collection
from dataclasses import asdict, dataclass

from dlac_pipeline.extensions.chaos.faults import DAMAGE, HANG, PREEMPT, RANK, RANKS, SUPERVISOR, FaultKind

_WHILE_RECOVERING = 0.5
"""Share of the eligible faults that strike during the recovery from the one before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind(FaultKind):
    """A kind of fault of this campaign."""

    weight: int = 1
    """Relative frequency of the kind."""
    sensors: bool = False
    """Whether Dagster's sensors must have run again."""
    every_run: bool = False
    """Whether it strikes all runs, and not one."""


KINDS = {
    "rank killed": Kind(**asdict(RANK), weight=4),
    "all ranks killed": Kind(**asdict(RANKS), weight=2),
    "rank stopped": Kind(**asdict(HANG), weight=2),
    "fork server killed": Kind(description="SIGKILL of the process that the ranks are forked from", follows=True),
    "supervisor killed": Kind(**asdict(SUPERVISOR), weight=2),
    "run worker killed": Kind(description="SIGKILL of the Dagster run's process", weight=2, follows=True),
    "code server killed": Kind(description="SIGKILL of Dagster's code server", new_attempt=False, sensors=True),
    "daemon killed": Kind(
        description="SIGKILL of Dagster's daemon, which is started again 2 s later",
        new_attempt=False,
        sensors=True,
        follows=True,
    ),
    "everything killed": Kind(
        description="SIGKILL of daemon, code server, run workers, supervisors and ranks of all runs; the daemon is started again",
        sensors=True,
        every_run=True,
    ),
    "rank preempted": Kind(description="SIGUSR1 to a rank: a preemption"),
    "supervisor preempted": Kind(**asdict(PREEMPT)),
    "run worker preempted": Kind(description="SIGTERM to the Dagster run's process"),
    "checkpoint deleted": Kind(
        description="a file of the newest checkpoint is deleted, its states in memory are lost, and all ranks are killed",
        weight=2,
    ),
    "checkpoint flipped": Kind(**asdict(DAMAGE), weight=2),
    "store full": Kind(description="no byte is free in the checkpoint store for 8 s", every_run=True),
    "catalog locked": Kind(description="another process holds the catalog's lock for 8 s", new_attempt=False),
    "catalog away": Kind(
        description="the catalog's file is missing for 8 s, during which a rank is killed", survived=True
    ),
    "launch stopped": Kind(
        description="SIGSTOP of everything from the Dagster run's process down to the ranks; SIGCONT once another has taken over"
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One planned fault."""

    number: int
    kind: str
    moment: float
    """Its due time, as a share of the campaign's time."""
    run: int
    """The slot of the run that it strikes."""
    follows: bool
    """Whether it strikes the same run during the recovery from the fault before."""
    seed: int
    """Seed of the random choices at the strike."""


def choose(seed: int, faults: int, *, runs: int, without: Collection[str] = ()) -> list[Choice]:
    """Return the faults of a campaign in order: every kind once, if there are enough, then kinds by their weights.

    Args:
        seed: the same seed chooses the same faults.
        faults: number of faults.
        runs: number of runs that train at the same time.
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
    """Return whether a fault may follow: at most two strike together, as three attempts without a checkpoint end a run."""
    return before is not None and not before.follows and KINDS[kind].follows and KINDS[before.kind].new_attempt
