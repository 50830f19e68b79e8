"""Choice of the interval between checkpoints: the optimum of what checkpoints cost and failures lose."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dlac_pipeline.checkpoint.interval import Choice, Interval
from dlac_pipeline.checkpoint.step_sync import NOTICES, SYNC_EVERY_S
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow
from dlac_pipeline.spec.job_spec import CheckpointSpec, JobSpec
from dlac_pipeline.spec.launch_spec import NODES

MOST_OVERHEAD = 0.1
"""Share of the time that checkpoints may take at the most, whatever the failure rate."""
_PRIOR_MTBF_S = 86_400.0
"""Time between failures until the run has failed: a day. The interval grows with its root only, and is measured afterwards."""
_FIRST_S = 60.0
"""Seconds until the first checkpoint of a run, whose cost is unknown."""
_LEFT_WELL = ("end", "left", NODES, *NOTICES)
"""Reasons of last checkpoints."""
_NEWS = 0.1
"""Relative change of the interval that is worth an event."""


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints that lose the least, if a checkpoint costs `cost_s`.

    Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems 22 (2006), equation 37. Its first term is Young's (1974) sqrt(2 cost mtbf).
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return math.sqrt(2 * cost_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """Number of a run's failures, and its time of training."""

    count: int = 0
    trained_s: float = 0.0

    @classmethod
    def of_rows(cls, rows: Sequence[LedgerRow], recoveries: Sequence[Recovery]) -> "Failures":
        """Count the attempts before the last claim, except attempts that ended with a checkpoint on purpose, or by a rewind."""
        seen_alive = {each.replaced_attempt: each.failed_at for each in recoveries}
        claims = [row for row in rows if isinstance(row, ClaimRow) and row.trains][:-1]
        rewound = {row.replaces for row in rows if isinstance(row, ClaimRow) and row.purpose == "rewinds"}
        count, trained_s = 0, 0.0
        for claim in claims:
            attempt, began = claim.attempt, claim.committed_at
            taken = [row for row in rows if isinstance(row, CheckpointRow) and row.attempt == attempt]
            ended = max([began, *(row.committed_at for row in taken), seen_alive.get(attempt, began)])
            trained_s += (ended - began).total_seconds()
            left_well = bool(taken) and taken[-1].reason in _LEFT_WELL
            count += not (left_well or attempt in rewound)
        return cls(count=count, trained_s=trained_s)

    def mtbf_s(self, prior_s: float) -> float:
        """Mean time between failures. Before the first failure: the prior, or the time without one if that is longer."""
        return self.trained_s / self.count if self.count and self.trained_s else max(prior_s, self.trained_s)

    def describe(self, mtbf_s: float) -> str:
        """Return the failures as a phrase."""
        if not self.count:
            return f"no failure yet, taken as one in {mtbf_s / 3600:.2g} h"
        return f"{self.count} failure{'s' * (self.count > 1)} in {self.trained_s / 3600:.2g} h of training"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of a checkpoint, in seconds."""

    lost_s: float
    """Training time that it takes away: the wait of training, and its slowdown during the commit."""
    total_s: float
    """Seconds until it is committed."""

    @classmethod
    def of_rows(cls, rows: Sequence[LedgerRow]) -> "Cost | None":
        """Return the cost that the last checkpoint recorded, without its commit, or None."""
        found = [row.phases for row in rows if isinstance(row, CheckpointRow) and row.phases]
        if not found:
            return None
        total_s = sum(found[-1].get(name, 0.0) for name in ("copy", "write", "seal", "vote"))
        return cls(lost_s=found[-1].get("stall", total_s), total_s=total_s)


def choose_interval(settings: CheckpointSpec, cost: Cost | None, failures: Failures) -> Choice:
    """The interval between checkpoints, in seconds of training, that `settings` ask for."""
    wished_s = settings.every_s
    if cost is None:
        return Choice(interval_s=min(_FIRST_S, wished_s or _FIRST_S), reason="the first one shows what they cost")
    mtbf_s = failures.mtbf_s(_PRIOR_MTBF_S)
    optimum_s = daly_interval_s(cost.lost_s, mtbf_s)
    optimum = f"optimum for checkpoints that cost {cost.lost_s:.2g} s, {failures.describe(mtbf_s)}"
    at_least_s, floor = max(
        (cost.lost_s * (1 / MOST_OVERHEAD - 1), f"so that they take {MOST_OVERHEAD:.0%} of the time at the most"),
        (cost.total_s, "as long as one takes"),
        (SYNC_EVERY_S, "as often as ranks agree"),
    )
    at_most_s = wished_s - cost.total_s - SYNC_EVERY_S if wished_s else math.inf
    if at_least_s <= optimum_s <= at_most_s:
        return Choice(interval_s=optimum_s, reason=optimum)
    if optimum_s < at_least_s <= at_most_s:
        return Choice(interval_s=at_least_s, reason=f"{floor}; {optimum} is {optimum_s:.2g} s")
    if at_least_s <= at_most_s:
        reason = f"wished recovery point of {wished_s:g} s; {optimum} is {optimum_s:.0f} s"
        return Choice(interval_s=at_most_s, reason=reason)
    return Choice(
        interval_s=at_least_s,
        reason=f"the wished recovery point of {wished_s:g} s cannot be held by checkpoints that take {cost.total_s:.2g} s "
        f"and cost {cost.lost_s:.2g} s",
    )


def open_automatic(spec: JobSpec, lakehouse: Lakehouse, now: float) -> "AutomaticInterval":
    """Return the clock of a run, with the cost of its past checkpoints and the number of its failures by the ledger."""
    rows = Ledger(lakehouse).rows(spec.run, kinds=(ClaimRow, CheckpointRow))
    failures = Failures.of_rows(rows, recoveries_of(lakehouse, spec.run))
    return AutomaticInterval(spec.checkpoint, now, cost=Cost.of_rows(rows), failures=failures)


class AutomaticInterval(Interval):
    """The clock with the interval that costs the least, by measurements."""

    def __init__(self, settings: CheckpointSpec, now: float, *, cost: Cost | None, failures: Failures) -> None:
        super().__init__(choose_interval(settings, cost, failures), now)
        self._settings = settings
        self._began = self._stepped = now
        self._cost = cost
        self._before = failures
        self._idle, self._busy = _Pace(), _Pace()
        self._reported_s = 0.0

    def step_done(self, now: float, *, in_background: bool) -> None:
        """Note a step. `in_background`: a checkpoint is being committed in the background, which may slow it down."""
        (self._busy if in_background else self._idle).add(now - self._stepped)
        self._stepped = now

    def taken(self, now: float) -> None:
        """Note that a checkpoint was taken, or passed on to be committed in the background."""
        super().taken(now)
        self._stepped = now

    def committed(self, now: float, phases: Mapping[str, float]) -> None:
        """Take the cost of a checkpoint into account, and choose again."""
        super().committed(now, phases)
        lost_s = phases["stall"] + self._busy.slower_than(self._idle)
        self._busy = _Pace()
        if self._cost is not None:
            lost_s = (lost_s + self._cost.lost_s) / 2  # one slow disk does not make a rule
        self._cost = Cost(lost_s=lost_s, total_s=self._took_s)
        failures = Failures(count=self._before.count, trained_s=self._before.trained_s + now - self._began)
        self.choice = choose_interval(self._settings, self._cost, failures)

    def news(self) -> Choice | None:
        """Return the choice, if it differs from the last one reported."""
        choice = self.choice
        if abs(choice.interval_s - self._reported_s) <= _NEWS * self._reported_s:
            return None
        self._reported_s = choice.interval_s
        return choice


@dataclass(slots=True)
class _Pace:
    steps: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.steps += 1
        self.seconds += seconds

    def slower_than(self, other: "_Pace") -> float:
        """Return the seconds that these steps took longer than as many further steps, or 0 without a comparison."""
        if not self.steps or not other.steps:
            return 0.0
        return max(0.0, self.seconds - self.steps * other.seconds / other.steps)
