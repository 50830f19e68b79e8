"""The permutation of a block, and the rows that key groups are dealt."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.cut import MAX_BLOCK_ROWS, choose_permutation, deal, draw_sort_keys, mix

KEYS = st.integers(0, 2**64 - 1)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3000), KEYS, st.booleans())
def test_map_is_bijection_with_inverse(rows: int, key: int, shuffle: bool) -> None:
    """Positions map to every row of the block once, and the inverse maps the rows to their positions."""
    permutation = choose_permutation(rows, key, shuffle=shuffle)
    at = permutation.rows_at(np.arange(rows))
    assert sorted(at) == list(range(rows))
    assert (permutation.positions_of(at) == np.arange(rows)).all()


@settings(max_examples=50, deadline=None)
@given(KEYS)
def test_largest_block_does_not_overflow(key: int) -> None:
    """Map and inverse agree at the largest allowed number of rows."""
    rows = MAX_BLOCK_ROWS - 1
    permutation = choose_permutation(rows, key, shuffle=True)
    at = permutation.rows_at(np.arange(rows - 100, rows))
    assert ((at >= 0) & (at < rows)).all()
    assert (permutation.positions_of(at) == np.arange(rows - 100, rows)).all()


@pytest.mark.parametrize("rows", [0, -1, MAX_BLOCK_ROWS])
def test_unmappable_block_is_refused(rows: int) -> None:
    """A block without rows, or with so many that the arithmetic would overflow, is an error that names the number."""
    with pytest.raises(ValueError, match=str(rows)):
        choose_permutation(rows, 0, shuffle=True)


def test_splitmix64_matches_publication() -> None:
    """The generator returns the published first outputs for state 0, so that any engine can repeat the order."""
    gamma = 0x9E3779B97F4A7C15
    assert [mix(0), mix(gamma), mix(2 * gamma)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 500), KEYS)
def test_sort_keys_differ(size: int, key: int) -> None:
    """Each index appears once."""
    assert len(set(draw_sort_keys(size, key).tolist())) == size


EXAMPLES = settings(max_examples=200, deadline=None)


@EXAMPLES
@given(st.integers(0, 10_000), st.lists(st.integers(0, 500), min_size=1, max_size=64))
def test_deal_levels_uneven_groups(live_rows: int, dealt: list[int]) -> None:
    """All rows are dealt, first to the groups with the fewest. A group that gets rows ends at most one row above another."""
    before = np.array(dealt, dtype=np.int64)
    shares = deal(live_rows, before)
    assert shares.sum() == live_rows
    assert (shares >= 0).all()
    after = before + shares
    if live_rows:
        assert after[shares > 0].max() - after.min() <= 1


@EXAMPLES
@given(st.lists(st.integers(0, 300), max_size=20), st.lists(st.integers(0, 50), min_size=1, max_size=64))
def test_partial_deals_equal_one_deal(appends: list[int], dealt: list[int]) -> None:
    """The number of deals does not change which rows each group has at the end."""
    before = np.array(dealt, dtype=np.int64)
    total = before.copy()
    for live_rows in appends:
        total = total + deal(live_rows, total)
    assert (total == before + deal(sum(appends), before)).all()
