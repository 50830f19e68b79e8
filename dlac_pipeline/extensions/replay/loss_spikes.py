"""Loss spikes: steps whose loss is far above those before. One rule for `dlac spike` and `launch.on_spike`.

A loss is a spike if it is not finite, or if it lies above the median of the `WINDOW` losses before by more than `FACTOR` times
their scaled median absolute deviation. The deviation counts as at least 1 % of the median, so that a flat loss has no spikes.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, lineage_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, LedgerRow

WINDOW = 50
"""Applied steps with which the loss of the next one is compared."""
FACTOR = 6.0
_LEAST = 10
"""Losses without which only NaN and infinity are spikes."""
_NORMAL = 1.4826
"""Standard deviation of a normal distribution in median absolute deviations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spike:
    """Consecutive steps whose losses are far above those before. The first step began it."""

    step: int
    last_step: int
    loss: float
    """Loss of the first step."""
    peak: float
    """Largest loss of these steps."""
    before: float
    """Median of the losses before."""

    @property
    def rise(self) -> float:
        """Largest loss minus the median before."""
        return finite_or_inf(self.peak - self.before)


class LossWindow:
    """The losses of the last applied steps. NaN and infinity are left out."""

    def __init__(self, losses: Mapping[int, float]) -> None:
        """Begin with the losses of earlier steps."""
        self._losses: deque[float] = deque()
        self._sorted: list[float] = []
        for step in sorted(losses):
            self.add(losses[step])

    @property
    def middle(self) -> float:
        """The median, or 0 without losses."""
        return median(self._sorted or [0.0])

    @property
    def limit(self) -> float:
        """The loss above which the next step is a spike. Infinite if too few losses are known."""
        if len(self._sorted) < _LEAST:
            return math.inf
        deviation = _NORMAL * median(abs(loss - self.middle) for loss in self._sorted)
        return self.middle + FACTOR * max(deviation, 0.01 * abs(self.middle))

    def is_spike(self, loss: float) -> bool:
        """Return True if the loss of the next step is a spike."""
        return not math.isfinite(loss) or (loss > self.middle and loss > self.limit)

    def add(self, loss: float) -> None:
        """Add the loss of an applied step."""
        if math.isfinite(loss):
            self._losses.append(loss)
            insort(self._sorted, loss)
        if len(self._losses) > WINDOW:
            del self._sorted[bisect_left(self._sorted, self._losses.popleft())]


def find_spikes(losses: Mapping[int, float]) -> list[Spike]:
    """Return the spikes among the losses of applied steps, by step."""
    window, spikes, previous = LossWindow({}), list[Spike](), 0
    for step in sorted(losses):
        loss = losses[step]
        if window.is_spike(loss) and spikes and spikes[-1].last_step == previous:
            spikes[-1] = replace(spikes[-1], last_step=step, peak=max(spikes[-1].peak, loss, key=finite_or_inf))
        elif window.is_spike(loss):
            spikes.append(Spike(step=step, last_step=step, loss=loss, peak=loss, before=window.middle))
        window.add(loss)
        previous = step
    return spikes


def count_to_blame(samples: Sequence[tuple[float, int]], limit: float) -> int:
    """Return how many samples (loss, items), sorted from the largest loss, the step must leave out so that it is no spike.

    It is 0 for a step that is none, and for one that would have to leave out more than half: its weights are to blame.
    """
    total, items, count = sum(loss * n for loss, n in samples if math.isfinite(loss)), sum(n for _, n in samples), 0
    for loss, n in samples:
        if math.isfinite(loss) and total <= limit * items:
            break
        total, items, count = total - (loss * n if math.isfinite(loss) else 0.0), items - n, count + 1
    return count if count <= len(samples) / 2 else 0


def finite_or_inf(loss: float) -> float:
    """Return a loss for comparisons: NaN is as bad as infinity."""
    return loss if math.isfinite(loss) else math.inf


def recorded_losses(
    ledger: Ledger, rows: Sequence[LedgerRow], head: str | None, *, least: float = math.inf
) -> dict[int, float]:
    """Return step -> loss of the applied steps on the lineage of a checkpoint, from the rows of the run.

    Checkpoints that are older than the last `least` steps are left out.
    """
    checkpoints, losses, read = checkpoint_rows(rows), dict[int, float](), list[CheckpointRow]()
    for name in lineage_of(rows, head):
        if len(losses) < least:
            read.append(row := checkpoints[name])
            losses.update(enumerate(row.losses, row.step - len(row.losses) + 1))
    skipped = ledger.skipped_steps(read)
    return {step: losses[step] for step in sorted(losses) if step not in skipped}
