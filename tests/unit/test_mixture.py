from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.mixture import MAX_KEY_GROUPS, Mixture, Present

EXAMPLES = settings(max_examples=40, deadline=None)
PERIOD = MAX_KEY_GROUPS + 1
WEIGHTS = st.lists(st.one_of(st.floats(0.01, 10), st.sampled_from([1e-4, 1e-3, 1.0, 1000.0])), min_size=1, max_size=8)
GROUPS = st.one_of(st.integers(1, 64), st.sampled_from([1024, 4096, 28_657, MAX_KEY_GROUPS]))
FEW = 10.0
"""Maximum deviation of any two periods from a source's share, in samples: 6.8 is the maximum among thousands of weights,
and weights are rounded to the places of a period."""


def presents(sources: int) -> st.SearchStrategy[Present]:
    """At least one of the sources is present."""
    return st.lists(st.booleans(), min_size=sources, max_size=sources).filter(any).map(tuple)


@EXAMPLES
@given(WEIGHTS, GROUPS, st.data())
def test_counts_match_schedule(weights: list[float], groups: int, data: st.DataObject) -> None:
    """Counting a range gives the same as walking it, near the beginning and far from it. An absent source gives nothing."""
    mixture, present = Mixture(weights, groups), data.draw(presents(len(weights)))
    group = data.draw(st.integers(0, groups - 1))
    start = data.draw(st.one_of(st.integers(0, 3 * PERIOD), st.integers(0, 10**11)))
    stop = start + data.draw(st.one_of(st.integers(0, 50), st.integers(0, 2 * PERIOD)))
    sources = mixture.sources(group, start, stop, present)
    counts = mixture.counts(group, start, stop, present)
    assert counts.tolist() == np.bincount(sources, minlength=len(weights)).tolist()
    assert all(here or not count for here, count in zip(present, counts.tolist(), strict=True))


@EXAMPLES
@given(WEIGHTS, GROUPS, st.data())
def test_nth_sample_of_source_is_found(weights: list[float], groups: int, data: st.DataObject) -> None:
    """The n-th sample of a source after a place is found: the range up to it has n samples of the source, and n - 1 before it."""
    mixture, present = Mixture(weights, groups), data.draw(presents(len(weights)))
    group, start = data.draw(st.integers(0, groups - 1)), data.draw(st.integers(0, 10**6))
    source = data.draw(st.sampled_from([index for index, here in enumerate(present) if here]))
    count = data.draw(st.integers(1, 200))
    stop = mixture.nth(group, start, source, count, present)
    assert mixture.counts(group, start, stop, present)[source] == count
    assert mixture.counts(group, start, stop - 1, present)[source] == count - 1
    assert mixture.nth(group, start, source, 0, present) == start


@EXAMPLES
@given(st.lists(st.tuples(st.floats(0.01, 10), st.booleans()), min_size=2, max_size=6), GROUPS, st.data())
def test_late_source_waits_for_others(mixed: list[tuple[float, bool]], groups: int, data: st.DataObject) -> None:
    """The schedule has the sources that are not late, and late ones alone when no other remains."""
    weights, late = zip(*mixed, strict=True)
    present = data.draw(presents(len(weights)))
    early = tuple(here and not waits for here, waits in zip(present, late, strict=True))
    expected, found = Mixture(weights, groups), Mixture(weights, groups, late=late)
    group, start = data.draw(st.integers(0, groups - 1)), data.draw(st.integers(0, 10**6))
    same, samples = early if any(early) else present, (group, start, start + 300)
    assert found.drawn(present) == same
    assert found.sources(*samples, present).tolist() == expected.sources(*samples, same).tolist()
    assert found.counts(*samples, present).tolist() == expected.counts(*samples, same).tolist()


@EXAMPLES
@given(WEIGHTS, st.data())
def test_any_range_has_source_shares(weights: list[float], data: st.DataObject) -> None:
    """Over all key groups each source is within a few samples of its weight, in any range."""
    present = data.draw(presents(len(weights)))
    sources = Mixture(weights, 1).sources(0, 0, 2 * PERIOD, present)
    shares = np.where(present, weights, 0.0)
    for source, share in enumerate(shares / shares.sum()):
        ahead = np.cumsum(sources == source) - share * np.arange(1, 2 * PERIOD + 1)
        assert ahead.max() - ahead.min() < FEW


@EXAMPLES
@given(WEIGHTS, st.integers(1, 64), st.integers(1, 40), st.data())
def test_groups_share_one_schedule(weights: list[float], groups: int, samples: int, data: st.DataObject) -> None:
    """Sample k of key group g is the (k*G + g)-th of the schedule, in any order of access."""
    mixture, present = Mixture(weights, groups), data.draw(presents(len(weights)))
    start = data.draw(st.integers(0, 10**6))
    together = np.stack([mixture.sources(group, start, start + samples, present) for group in range(groups)], axis=1)
    whole = Mixture(weights, 1).sources(0, start * groups, (start + samples) * groups, present)
    assert together.reshape(-1).tolist() == whole.tolist()
    bounds = sorted(data.draw(st.sets(st.integers(0, samples), max_size=4)) | {0, samples})
    parts = [mixture.sources(0, start + low, start + high, present) for low, high in pairwise(bounds)]
    assert np.concatenate(parts).tolist() == together[:, 0].tolist()


def test_smallest_share_has_one_place() -> None:
    """A weight below one place of the period is rounded up, so that every present source has a place."""
    counts = Mixture([1.0, 1e-9, 1e-9, 1e6], 3).counts(1, 0, PERIOD, (True, True, False, True))
    assert counts.tolist() == [1, 1, 0, PERIOD - 2]
