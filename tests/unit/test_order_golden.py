from __future__ import annotations

import numpy as np
import pytest

from dlac_pipeline.plan.cut import ORDER_VERSION, OrderSettings
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.units import UnitTable

GOLDEN = {
    True: [
        "0.1 1.2 3.3 3.0",
        "1.5 1.0 3.2 0.2",
        "1.3 0.0 3.1 2.0",
        "1.5 1.3 2.1 3.0",
        "0.2 0.0 2.1 2.0",
        "1.2 1.0 3.3 3.2",
        "0.1 3.1",
    ],
    False: [
        "0.0 0.1 1.5 2.0",
        "0.2 1.0 2.1 3.0",
        "1.2 1.3 3.1 3.2",
        "0.0 0.1 3.3 2.0",
        "0.2 1.0 2.1 3.0",
        "1.2 1.3 3.1 3.2",
        "1.5 3.3",
    ],
}


def batches(*, shuffle: bool) -> list[list[str]]:
    """Global batches of a small table as "unit.row"; unit 1 has two dead rows."""
    rows = np.array([3, 6, 2, 4], dtype=np.int64)
    units = UnitTable(
        file_paths=["f"],
        file=np.zeros(4, dtype=np.int64),
        row_group=np.arange(4),
        first_row=np.cumsum(rows) - rows,
        rows=rows,
        dead={1: np.array([1, 4])},
    )
    settings = OrderSettings(seed=7, key_groups=2, batch_size=4, block_slices=2, shuffle=shuffle)
    order = LegOrder(units, settings, 2)
    found = []
    for step in range(1, order.total_steps + 1):
        batch = []
        for group in range(2):
            start, stop = (int(order.consumed(s)[group]) for s in (step - 1, step))
            for stretch in order.stretches(group, start, stop):
                block = stretch.block
                for row in block.rows_of(stretch.start, stretch.stop):
                    at = int(np.searchsorted(block.base, row, side="right")) - 1
                    batch.append(f"{block.slices.unit[at]}.{block.slices.first[at] + row - block.base[at]}")
        found.append(batch)
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_version_1_is_pinned(shuffle: bool) -> None:
    """The order of version 1 never changes: committed cursors mean nothing under another one. Bump ORDER_VERSION instead."""
    assert ORDER_VERSION == 1
    assert [" ".join(batch) for batch in batches(shuffle=shuffle)] == GOLDEN[shuffle]
