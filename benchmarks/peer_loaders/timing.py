"""Rates of loaders and their times to resume: one rank each, all loaders in turn, round by round."""

import dataclasses
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dlac_pipeline.extensions.loader_check.client import LoaderFailed
from dlac_pipeline.extensions.loader_check.protocol import Job
from dlac_pipeline.extensions.loader_check.scenarios import LIMIT_S, Bench, Scenario

_BATCH = 64
_POSITIONS = (0.01, 0.5, 0.99)


@dataclass(slots=True)
class Speed:
    """One loader's rows per second, a value per round, or the reason for none."""

    rates: list[float] = field(default_factory=list)
    failed: str = ""

    @property
    def rate(self) -> float:
        """The median."""
        return statistics.median(self.rates)

    @property
    def spread(self) -> float:
        """Quartile range of each round's rate over the one before it, as the noise (A/A)."""
        rates = np.array(self.rates)
        return _quartile_range(rates[1:] / rates[:-1]) if len(rates) > 2 else 0.0


@dataclass(kw_only=True, slots=True)
class Resume:
    """Median seconds to the first batch at each position (1 %, 50 %, 99 %), and bytes of state at the second."""

    seconds: list[float]
    state_bytes: int


def speeds(benches: Mapping[str, Bench], *, shuffle: bool, rounds: int) -> dict[str, Speed]:
    """Measure a whole pass of every loader once per round, in turn, from opening it to its last batch.

    What a loader decodes ahead of its first batch would take no time if the clock began there.
    """
    found = {name: Speed() for name in benches}
    for _ in range(rounds):
        for name, bench in benches.items():
            speed = found[name]
            if speed.failed:
                continue
            try:
                measured = _run(bench, _job(bench, shuffle=shuffle))
                speed.rates.append((measured["seen"] + _BATCH) / (measured["first_batch_s"] + measured["seconds"]))
            except LoaderFailed as err:
                speed.failed = str(err)
    return found


def ratio(ours: Speed, theirs: Speed) -> tuple[float, float]:
    """Return our rate over theirs, round by round: the median and the quartile range."""
    ratios = np.array(ours.rates) / np.array(theirs.rates)
    return float(np.median(ratios)), _quartile_range(ratios)


def resume(bench: Bench, *, rounds: int) -> Resume | str:
    """Run one pass that saves at the positions, then resume at them in turn. Return the reason if this fails."""
    job = _job(bench, shuffle=False)
    steps = bench.size.rows // _BATCH
    saved = [max(1, round(position * steps)) for position in _POSITIONS]
    seconds: dict[int, list[float]] = {step: [] for step in saved}
    try:
        _run(bench, dataclasses.replace(job, save_at=saved))
        for _ in range(rounds):
            for step in saved:
                resumed = dataclasses.replace(job, load=f"{job.save}.step{step}", stop_at=step + 1)
                seconds[step].append(_run(bench, resumed)["first_batch_s"])
    except LoaderFailed as err:
        return f"failed: {err}"
    state = Path(f"{job.save}.step{saved[1]}").read_bytes().partition(b"\n")[2]
    return Resume(seconds=[statistics.median(times) for times in seconds.values()], state_bytes=len(state))


def _job(bench: Bench, *, shuffle: bool) -> Job:
    scenario = Scenario(name=f"timing-{shuffle}", description="", worlds=(1,), saves=(), shuffle=shuffle)
    job = bench.job(scenario, bench.table(scenario), launch=0, world=1, rank=0, stop=0)
    return dataclasses.replace(job, batch_size=_BATCH)


def _run(bench: Bench, job: Job) -> dict[str, float]:
    Path(job.log).unlink(missing_ok=True)
    return bench.host.consume([job], LIMIT_S)[0]


def _quartile_range(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    return float(np.ptp(np.quantile(values, [0.25, 0.75])))
