"""The trainings of `divergence`, summed up per setting and method."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.paper_parts.divergence import METHODS, SETTINGS, Outcome, distance, loss_distance, same

_STUDENT = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Number of seeds -> factor of a 95 % confidence interval of their mean (two-sided t distribution)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One method under faults, in one setting. Losses are mean losses of a byte."""

    setting: str
    method: str
    failed: tuple[str, ...]
    """Why trainings failed. Its other values are those of the others."""
    seeds: int
    """Trainings that did not fail. None: the means are NaN."""
    final: float
    """Mean of the last validation losses."""
    final_band: float
    """Half of its 95 % confidence interval."""
    final_variance: float
    excess: float
    """Mean of the last validation loss beyond that of the method's own undisturbed training with the same seed."""
    excess_band: float
    area: float
    """Mean distance of the validation curve from its own undisturbed one."""
    loss_distance: float
    """Mean distance of the training loss from the undisturbed one, as a share of it."""
    identical: int
    """Seeds whose losses are those of the undisturbed training, bit by bit."""
    repeated: float
    """Rows read too often, mean of the seeds."""
    missing: float
    rows: int
    """Rows that are to be read, each as often as the passes say."""
    worth: float
    """Steps after which the undisturbed training had the last validation loss, by linear interpolation of its curve."""
    reached: int
    """Seeds that had the last loss of their undisturbed training within the run."""
    reached_s: float
    """Mean of their seconds until then, with restarts and repeated steps. NaN of none."""
    computed: float
    """Steps that were computed for each step of the training."""


def summarize(outcomes: Sequence[Outcome], batch: int) -> list[Summary]:
    """Return the summaries, in the order of the settings and methods."""
    found = []
    for setting in dict.fromkeys(each.setting for each in outcomes):
        for method in METHODS:
            faulted = [each for each in outcomes if (each.setting, each.method) == (setting, method) and each.faulted]
            calm = calm_of(outcomes, setting, method)
            ended = [each for each in faulted if not each.failed and each.seed in calm]
            failed = tuple(each.failed for each in faulted if each.failed)
            if ended or failed:
                found.append(_summary(setting, method, ended, calm, failed, batch))
    return found


def summarize_undisturbed(outcomes: Sequence[Outcome], batch: int) -> list[Summary]:
    """Return the summaries of the trainings without faults, each compared with itself, in the same order.

    Those of a setting that is compared with another one are that one's.
    """
    found = []
    for setting in dict.fromkeys(each.setting for each in outcomes):
        for method in METHODS:
            calm = calm_of(outcomes, setting, method)
            if calm and not METHODS[method].calm and not SETTINGS[setting].calm:
                found.append(_summary(setting, method, [*calm.values()], calm, (), batch))
    return found


def calm_of(outcomes: Sequence[Outcome], setting: str, method: str) -> dict[int, Outcome]:
    """Return the undisturbed trainings that a method is compared with, by seed."""
    of, calm_setting = METHODS[method].calm or method, SETTINGS[setting].calm or setting
    return {
        each.seed: each
        for each in outcomes
        if (each.setting, each.method, each.faulted, each.failed) == (calm_setting, of, False, "")
    }


def band_of(values: Sequence[float]) -> float:
    """Return half of the 95 % confidence interval of a mean. 0 for a single value."""
    if len(values) < 2:
        return 0.0
    return float(_STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5)


def _summary(
    setting: str,
    method: str,
    ended: Sequence[Outcome],
    calm: dict[int, Outcome],
    failed: tuple[str, ...],
    batch: int,
) -> Summary:
    finals = [each.final for each in ended]
    reached = [at for each in ended if (at := seconds_to(calm[each.seed].final, each)) is not None]
    excess = [each.final - calm[each.seed].final for each in ended]
    return Summary(
        setting=setting,
        method=method,
        failed=failed,
        seeds=len(ended),
        final=_mean(finals),
        final_band=band_of(finals),
        final_variance=statistics.variance(finals) if len(finals) > 1 else 0.0,
        excess=_mean(excess),
        excess_band=band_of(excess),
        area=_mean([distance(each, calm[each.seed]) for each in ended]),
        loss_distance=_mean([loss_distance(each, calm[each.seed]) for each in ended]),
        identical=sum(same(each, calm[each.seed]) for each in ended),
        repeated=_mean([each.repeated for each in ended]),
        missing=_mean([each.missing for each in ended]),
        rows=max((each.trained for each in ended), default=0) * batch,
        worth=_mean([steps_worth(each.final, calm[each.seed]) for each in ended]),
        reached=len(reached),
        reached_s=_mean(reached),
        computed=_mean([each.computed / each.trained for each in ended]),
    )


def _mean(values: Sequence[float]) -> float:
    """Return the mean, or NaN of none."""
    return statistics.mean(values) if values else math.nan


def steps_worth(loss: float, calm: Outcome) -> float:
    """Return the steps after which an undisturbed training has this validation loss. All of them if its last one is no better."""
    return max(calm.validation) if loss <= calm.final else _steps_to(loss, calm)


def seconds_to(loss: float, outcome: Outcome) -> float | None:
    """Return the seconds after which a training had this validation loss, at its mean time of a step, or None if it never had.

    The time of a step is that of the whole training over the steps that counted. Between two evaluations the loss is linear.
    """
    if min(outcome.validation.values()) > loss:
        return None
    return _steps_to(loss, outcome) * outcome.seconds / outcome.trained


def _steps_to(loss: float, outcome: Outcome) -> float:
    """Return the steps after which a training first had this validation loss or a better one, by linear interpolation."""
    steps = sorted(outcome.validation)
    best = np.minimum.accumulate([outcome.validation[step] for step in steps])
    after = int(np.argmax(best <= loss))
    if not after:
        return steps[0]
    share = (best[after - 1] - loss) / (best[after - 1] - best[after])
    return float(steps[after - 1] + share * (steps[after] - steps[after - 1]))
