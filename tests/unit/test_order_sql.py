import duckdb
import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.slices import cut_id_of, slices_arrow
from tests.legs import order_of, units_of

POSITIONS = """
SELECT unit, row, key_group, block,
       (a_inv * ((base + row - first_row - c + block_rows) % block_rows)) % block_rows AS position
FROM (SELECT *, unnest(range(first_row, first_row + rows)) AS row FROM slices)
ANTI JOIN dead USING (unit, row)
ORDER BY ALL
"""


@st.composite
def orders(draw: st.DrawFn) -> LegOrder:
    """A random order of two passes. The first row of every other unit is dead."""
    rows = draw(st.lists(st.integers(2, 40), min_size=1, max_size=12))
    key_groups = draw(st.integers(1, 6))
    return order_of(
        units_of(rows, {unit: [0] for unit in range(0, len(rows), 2)}),
        2,
        seed=draw(st.integers(0, 2**63 - 1)),
        key_groups=key_groups,
        batch_size=60,
        block_slices=draw(st.integers(1, 4)),
        shuffle=draw(st.booleans()),
    )


def python_positions(order: LegOrder, pass_index: int) -> list[tuple[int, int, int, int, int]]:
    """Return (unit, row, key group, block, position) of every live row of a pass, as the readers compute it."""
    found = []
    cut = order.sources[0].cut_of(pass_index)
    for group in range(order.settings.key_groups):
        for index in range(cut.block_count(group)):
            block = cut.block(group, index)
            for live, row in enumerate(block.rows_of(0, block.live_rows).tolist()):
                at = int(np.searchsorted(block.base, row, side="right")) - 1
                offset = int(block.slices.first[at] + row - block.base[at])
                found.append((int(block.slices.unit[at]), offset, group, index, block.position_after(live + 1) - 1))
    return sorted(found)


@settings(max_examples=25, deadline=None)
@given(orders())
def test_sql_and_python_agree_on_every_row(order: LegOrder) -> None:
    """One line of integer SQL over `slices` gives every live row the position at which the readers consume it."""
    units = sorted(order.sources[0].units["p"].dead)
    dead = pa.table({"unit": pa.array(units), "row": pa.array([0] * len(units))})
    with duckdb.connect() as connection:
        connection.register("dead", dead)
        for pass_index in range(2):
            cut = order.sources[0].cut_of(pass_index)
            connection.register("slices", slices_arrow(cut_id_of("plan", cut), "plan", cut))
            assert connection.execute(POSITIONS).fetchall() == python_positions(order, pass_index)


def test_cut_id_depends_on_its_inputs() -> None:
    """Another plan, pass, seed or shuffle gives another cut id. The number of ranks and the batch size do not."""

    def cut_id(plan: str = "p", pass_index: int = 0, **changes: int) -> str:
        fields = {"seed": 1, "key_groups": 2, "batch_size": 4, "block_slices": 1, "shuffle": True, **changes}
        return cut_id_of(plan, order_of(units_of([9]), 2, **fields).sources[0].cut_of(pass_index))

    ids = [cut_id(), cut_id("q"), cut_id(pass_index=1), cut_id(seed=2), cut_id(shuffle=False), cut_id(block_slices=2)]
    assert len(set(ids)) == len(ids)
    assert cut_id(batch_size=8) == cut_id()
