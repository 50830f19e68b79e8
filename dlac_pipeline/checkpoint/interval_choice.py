"""The one choice of intervals: between checkpoints, and between states in memory. In: costs, failures, limits. Out: seconds.

Source: J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation Computer
Systems 22 (2006), equation 37. Its first term is Young's (1974) sqrt(2 cost mtbf).
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from dlac_pipeline.lakehouse.ledger.typed_rows import NODES, CheckpointRow, ClaimRow, LedgerRow
from dlac_pipeline.spec.job_spec import CheckpointSpec
from dlac_pipeline.spec.launch_spec import NOTICES

_MOST_OVERHEAD = 0.1
"""Share of the time that checkpoints may take at the most, whatever the failure rate."""
_STATES_OVERHEAD = 0.02
"""Share of the time that states in memory may take at the most, whatever the failure rate."""
_POINT_OVERHEAD = 0.005
"""Share of the time that states in memory may take for the default of `memory_point_s`."""
_POINT_S = 10.0
"""The default of `checkpoint.memory_point_s`."""
_PRIOR_MTBF_S = 86_400.0
"""Time between failures until the run has failed: a day. The interval grows with its root only, and is measured afterwards."""
_FIRST_S = 60.0
"""Seconds until the first checkpoint of a run, whose cost is unknown."""
_LEFT_WELL = ("end", "left", NODES, *NOTICES)
"""Reasons of last checkpoints."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """An interval and the reason for it."""

    interval_s: float
    reason: str
    least_s: float = 0.0
    """The shortest interval that is worth its cost."""

    def steps(self, step_s: float) -> int:
        """Return the interval in steps of so many seconds. The last step ends within it, unless it would cost too much."""
        step_s = max(step_s, 1e-6)
        return max(1, math.ceil(self.least_s / step_s), math.floor(self.interval_s / step_s))


def daly_interval_s(cost_s: float, mtbf_s: float) -> float:
    """Return the seconds of work between checkpoints that lose the least, if a checkpoint costs `cost_s`."""
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
    def of_rows(cls, rows: Sequence[LedgerRow]) -> "Failures":
        """Count the attempts before the last claim, except attempts that ended with a checkpoint on purpose, or by a rewind.

        An attempt has lived until its last checkpoint or the last state that a claim names, and at most a minute longer. One
        without a checkpoint after the end of a leg does not count: it may have found no new rows.
        """
        claims = [row for row in rows if isinstance(row, ClaimRow)]
        rewound = {row.replaces for row in claims if row.purpose == "rewinds"}
        taken: dict[int, list[CheckpointRow]] = defaultdict(list)
        for row in rows:
            if isinstance(row, CheckpointRow):
                taken[row.attempt].append(row)
        kept = {row.memory_of: datetime.fromtimestamp(row.memory_at, UTC) for row in claims}
        count, trained_s, reason = 0, 0.0, ""
        for claim, following in pairwise(claims):
            began, own = claim.committed_at, taken[claim.attempt]
            left_well = own[-1].reason in _LEFT_WELL if own else reason == "end"
            reason = own[-1].reason or "" if own else reason
            seen_at = max([began, *(row.committed_at for row in own), kept.get(claim.attempt, began)])
            longer = timedelta() if left_well else timedelta(seconds=_FIRST_S)
            if claim.trains:
                trained_s += (max(seen_at, min(seen_at + longer, following.committed_at)) - began).total_seconds()
                count += not (left_well or claim.attempt in rewound)
        return cls(count=count, trained_s=trained_s)

    def after(self, seconds: float) -> "Failures":
        """Return the failures once the attempt has trained so long."""
        return replace(self, trained_s=self.trained_s + seconds)

    def mtbf_s(self) -> float:
        """Mean time between failures. Before the first failure: a day, or the time without one if that is longer."""
        return self.trained_s / self.count if self.count and self.trained_s else max(_PRIOR_MTBF_S, self.trained_s)

    def describe(self) -> str:
        """Return the failures as a phrase."""
        if not self.count:
            return f"no failure yet, taken as one in {self.mtbf_s() / 3600:.2g} h"
        return f"{self.count} failure{'s' * (self.count > 1)} in {self.trained_s / 3600:.2g} h of training"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of a checkpoint or a state, in seconds."""

    lost_s: float
    """Training time that it takes away: the wait of training, and its slowdown during the commit."""
    total_s: float
    """Seconds until it is committed, or sealed."""

    @classmethod
    def of_rows(cls, rows: Sequence[LedgerRow]) -> "Cost | None":
        """Return the cost that the last checkpoint recorded, without its commit, or None."""
        found = [row.phases for row in rows if isinstance(row, CheckpointRow) and row.phases]
        if not found:
            return None
        total_s = sum(found[-1].get(name, 0.0) for name in ("copy", "write", "seal", "vote"))
        return cls(lost_s=found[-1].get("stall", total_s), total_s=total_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Limits of an interval."""

    point_s: float = math.inf
    """Seconds of work that a failure may cost."""
    point_overhead: float = _MOST_OVERHEAD
    """Share of the time that may be spent for `point_s`."""
    overhead: float = _MOST_OVERHEAD
    """Share of the time that may be spent whatever the failure rate."""
    agreed_s: float = 0.0
    """Seconds until all ranks know that the interval has passed."""

    @classmethod
    def of_states(cls, settings: CheckpointSpec) -> "Limits":
        """Return the limits of the interval between states in memory. A point that the user sets may cost more."""
        point_s = settings.memory_point_s
        if point_s is None:
            return cls(point_s=_POINT_S, point_overhead=_POINT_OVERHEAD, overhead=_STATES_OVERHEAD)
        return cls(point_s=point_s, point_overhead=_STATES_OVERHEAD, overhead=_STATES_OVERHEAD)


def choose_interval(cost: Cost | None, failures: Failures, limits: Limits) -> Choice:
    """Return the interval of least cost, in seconds of training, between its limits.

    It is the optimum for the cost and the failures, or the recovery point if that is shorter. Where these would take too much of
    the time, the limit of the time wins: states are paid for in each step, and a failure is rare.
    """
    if cost is None:
        first_s = min(_FIRST_S, failures.mtbf_s() / 2, limits.point_s)
        return Choice(interval_s=first_s, reason="the first one shows what they cost")
    optimum_s = daly_interval_s(cost.lost_s, failures.mtbf_s())
    optimum = f"optimum for checkpoints that cost {cost.lost_s:.2g} s, {failures.describe()}"
    floor_s, floor = max(
        (_at_least(cost, limits.overhead), f"so that they take {limits.overhead:.0%} of the time at the most"),
        (cost.total_s, "as long as one takes"),
        (limits.agreed_s, "as often as ranks agree"),
    )
    at_most_s = limits.point_s - cost.total_s - limits.agreed_s
    least_s = max(floor_s, min(optimum_s, _at_least(cost, limits.point_overhead)))
    if optimum_s <= at_most_s:
        reason = optimum if floor_s <= optimum_s else f"{floor}; {optimum} is {optimum_s:.2g} s"
    elif least_s <= at_most_s:
        reason = f"wished recovery point of {limits.point_s:g} s; {optimum} is {optimum_s:.0f} s"
    else:
        reason = f"the wished recovery point of {limits.point_s:g} s cannot be held by checkpoints that take "
        reason += f"{cost.total_s:.2g} s and cost {cost.lost_s:.2g} s"
    return Choice(interval_s=max(least_s, min(optimum_s, at_most_s)), reason=reason, least_s=least_s)


def _at_least(cost: Cost, overhead: float) -> float:
    """Return the shortest interval at which a cost is no larger share of the time."""
    return cost.lost_s * (1 / overhead - 1)
