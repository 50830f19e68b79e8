from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.cut import deal

EXAMPLES = settings(max_examples=200, deadline=None)


@EXAMPLES
@given(st.integers(0, 10_000), st.lists(st.integers(0, 500), min_size=1, max_size=64))
def test_deal_levels_uneven_groups(live_rows: int, dealt: list[int]) -> None:
    """All rows are dealt, to the groups that had least, so that no group that got any ends more than one above another."""
    before = np.array(dealt, dtype=np.int64)
    shares = deal(live_rows, before)
    assert shares.sum() == live_rows
    assert (shares >= 0).all()
    after = before + shares
    if live_rows:
        assert after[shares > 0].max() - after.min() <= 1


@EXAMPLES
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60), st.integers(1, 64))
def test_groups_stay_level_over_many_appends(appends: list[int], groups: int) -> None:
    """Dealing append after append leaves all key groups within one row of each other, all the time."""
    total = np.zeros(groups, dtype=np.int64)
    for live_rows in appends:
        total += deal(live_rows, total)
        assert total.max() - total.min() <= 1


@EXAMPLES
@given(st.lists(st.integers(0, 300), max_size=20), st.lists(st.integers(0, 50), min_size=1, max_size=64))
def test_dealing_in_parts_equals_dealing_once(appends: list[int], dealt: list[int]) -> None:
    """How the rows are divided among deals does not matter to what each group has in the end."""
    before = np.array(dealt, dtype=np.int64)
    total = before.copy()
    for live_rows in appends:
        total = total + deal(live_rows, total)
    assert (total == before + deal(sum(appends), before)).all()
