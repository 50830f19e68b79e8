from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.cut import deal

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
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 64))
def test_appends_keep_groups_level(appends: list[int], groups: int) -> None:
    """All key groups stay within one row of each other after every append."""
    total = np.zeros(groups, dtype=np.int64)
    for live_rows in appends:
        total += deal(live_rows, total)
        assert total.max() - total.min() <= 1


@EXAMPLES
@given(st.lists(st.integers(0, 300), max_size=20), st.lists(st.integers(0, 50), min_size=1, max_size=64))
def test_partial_deals_equal_one_deal(appends: list[int], dealt: list[int]) -> None:
    """The number of deals does not change which rows each group has at the end."""
    before = np.array(dealt, dtype=np.int64)
    total = before.copy()
    for live_rows in appends:
        total = total + deal(live_rows, total)
    assert (total == before + deal(sum(appends), before)).all()
