import numpy as np
import pytest

from dlac_pipeline.plan.cut import ORDER_VERSION
from tests.legs import order_of, units_of

GOLDEN = {
    True: "8.3 8.2 0.2 6.1 | 8.1 8.0 0.1 6.0 | 2.1 2.0 0.0 4.3 | 9.1 9.0 4.0 1.3 | 3.3 3.2 1.0 4.2 | "
    "3.1 3.0 1.5 1.2 | 7.2 7.1 4.4 4.1 | 7.0 5.0 5.0 4.3 | 9.1 9.0 4.4 1.2 | 7.1 6.0 1.5 1.0 | "
    "7.0 7.2 1.3 0.2 | 6.1 8.3 0.0 3.2 | 8.1 4.2 3.0 0.1 | 4.0 8.2 3.3 3.1 | 8.0 4.1 2.1 2.0",
    False: "0.0 0.1 4.2 4.3 | 0.2 1.0 4.4 5.0 | 1.2 1.3 6.0 6.1 | 1.5 2.0 7.0 7.1 | 2.1 3.0 7.2 8.0 | "
    "3.1 3.2 8.1 8.2 | 3.3 4.0 8.3 9.0 | 4.1 0.0 9.1 4.2 | 0.1 0.2 4.3 4.4 | 1.0 1.2 5.0 6.0 | "
    "1.3 1.5 6.1 7.0 | 2.0 2.1 7.1 7.2 | 3.0 3.1 8.0 8.1 | 3.2 3.3 8.2 8.3 | 4.0 4.1 9.0 9.1",
}


def batches(*, shuffle: bool) -> list[list[str]]:
    """Return the global batches of a small table as "unit.row". Unit 1 has two dead rows."""
    units = units_of([3, 6, 2, 4, 5, 1, 2, 3, 4, 2], {1: [1, 4]})
    order = order_of(units, 2, seed=7, key_groups=2, batch_size=4, block_slices=2, shuffle=shuffle)
    assert order.total_steps is not None
    found = []
    for step in range(1, order.total_steps + 1):
        batch = []
        for group in range(2):
            start, stop = (int(order.consumed(s)[0, group]) for s in (step - 1, step))
            for row_range in order.sources[0].row_ranges(group, start, stop):
                block = row_range.block
                for row in block.rows_of(row_range.start, row_range.stop):
                    at = int(np.searchsorted(block.base, row, side="right")) - 1
                    batch.append(f"{block.slices.unit[at]}.{block.slices.first[at] + row - block.base[at]}")
        found.append(batch)
    return found


@pytest.mark.parametrize("shuffle", [True, False])
def test_order_version_2_is_pinned(shuffle: bool) -> None:
    """The order of version 2 never changes, as committed cursors depend on it. Bump ORDER_VERSION instead."""
    assert ORDER_VERSION == 2
    assert " | ".join(" ".join(batch) for batch in batches(shuffle=shuffle)) == GOLDEN[shuffle]
