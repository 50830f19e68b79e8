from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.cut import OrderSettings, deal
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.units import UnitTable

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
@given(st.integers(1, 300), st.integers(1, 64), st.integers(0, 60))
def test_closed_form_of_what_was_dealt(live_rows: int, groups: int, pass_index: int) -> None:
    """What a leg without exclusions says was dealt before a pass is what dealing pass by pass gives."""
    units = UnitTable(
        file_paths=["f"],
        file=np.zeros(1, dtype=np.int64),
        row_group=np.zeros(1, dtype=np.int64),
        first_row=np.zeros(1, dtype=np.int64),
        rows=np.array([live_rows]),
    )
    order = OrderSettings(seed=0, key_groups=groups, batch_size=groups, block_slices=1, shuffle=True)
    leg = LegOrder(units, order, pass_index + 1)
    before = leg.dealt_before(pass_index)
    assert (leg.dealt_before(pass_index + 1) - before == deal(live_rows, before)).all()
    assert (leg.cut(pass_index).dealt == deal(live_rows, before)).all()
