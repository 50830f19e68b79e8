"""Mixture: the source of the n-th sample, by a deterministic weighted schedule without memory. See docs/design/0002-reader.md."""

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from dlac_pipeline.plan.units import Ints

_PERIOD = 65_537
_STRIDE = 40_504
"""The multiplier nearest to the period times the golden ratio."""
MAX_KEY_GROUPS = _PERIOD - 1

Present = tuple[bool, ...]
"""The sources that remain."""


class Mixture:
    """A schedule over weighted sources. Weights need not sum to one. `late` sources wait until no other one remains."""

    def __init__(self, weights: Sequence[float], key_groups: int, *, late: Sequence[bool] = ()) -> None:
        if not weights or min(weights) <= 0:
            raise ValueError(f"expected one or more weights above 0, found {list(weights)!r}")
        if not 0 < key_groups <= MAX_KEY_GROUPS:
            raise ValueError(f"expected 1 to {MAX_KEY_GROUPS} key groups, found {key_groups}")
        self._weights = np.array(weights, dtype=np.float64)
        self._key_groups = key_groups
        self._late = tuple(late) or (False,) * len(weights)
        self.everything: Present = (True,) * len(weights)
        self._bins = lru_cache(maxsize=None)(self._bins_of)
        self._counted = lru_cache(maxsize=64)(self._counts_of)

    def sources(self, group: int, start: int, stop: int, present: Present) -> Ints:
        """The source of each of a group's samples start .. stop-1, int64 [stop - start]."""
        present = self.drawn(present)
        if present.count(True) == 1:
            return np.full(stop - start, present.index(True), dtype=np.int64)
        n = np.arange(start, stop, dtype=np.int64) * self._key_groups + group
        return self._bins(present)[(n % _PERIOD) * _STRIDE % _PERIOD]

    def counts(self, group: int, start: int, stop: int, present: Present) -> Ints:
        """Return how many of a group's samples start .. stop-1 come from each source: int64 [sources]."""
        present = self.drawn(present)
        if present.count(True) == 1:
            return np.array([(stop - start) * here for here in present], dtype=np.int64)
        return self._until(group, stop, present) - self._until(group, start, present)

    def nth(self, group: int, start: int, source: int, count: int, present: Present) -> int:
        """The smallest stop for which `counts(group, start, stop)[source]` is `count`. `source` is one that is drawn."""
        present = self.drawn(present)
        if present.count(True) == 1:
            return start + count
        low, high = start + count, start + count
        while self.counts(group, start, high, present)[source] < count:
            high = start + 2 * (high - start) + 1
        stops = range(low, high)
        return low + bisect_left(stops, count, key=lambda stop: self.counts(group, start, stop, present)[source])

    def drawn(self, present: Present) -> Present:
        """Return the sources that samples come from while these remain."""
        early = tuple(here and not late for here, late in zip(present, self._late, strict=True))
        return early if any(early) else present

    def _until(self, group: int, stop: int, present: Present) -> Ints:
        counted = self._counted(present)
        # u moves by `step` per sample of a group, hence goes through the same cycle from another place.
        step = self._key_groups * _STRIDE % _PERIOD
        first = group * _STRIDE % _PERIOD * pow(step, -1, _PERIOD) % _PERIOD
        cycles, rest = divmod(first + stop, _PERIOD)
        total: Ints = cycles * counted[-1] + counted[rest] - counted[first]
        return total

    def _counts_of(self, present: Present) -> Ints:
        """Samples of each source in the first i places of the cycle, int64 [period + 1, sources]."""
        step = self._key_groups * _STRIDE % _PERIOD
        place = np.arange(_PERIOD, dtype=np.int64) * step % _PERIOD
        one_hot = self._bins(present)[place][:, None] == np.arange(len(self._weights))
        return np.concatenate([np.zeros((1, len(self._weights)), dtype=np.int64), np.cumsum(one_hot, axis=0)])

    def _bins_of(self, present: Present) -> Ints:
        """The source of each u, int64 [period]."""
        shares = np.where(present, self._weights, 0.0)
        edges = np.round(np.cumsum(shares) / shares.sum() * _PERIOD).astype(np.int64)
        widths = np.diff(edges, prepend=0)
        # Or a source with a tiny weight never came, and a run never ended.
        widths[(widths == 0) & np.array(present)] = 1
        widths[widths.argmax()] -= widths.sum() - _PERIOD
        edges = np.cumsum(widths)
        return np.searchsorted(edges, np.arange(_PERIOD), side="right").astype(np.int64)
