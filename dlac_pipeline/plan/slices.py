"""Slices of the passes that a run enters: computed from the cut of a pass, written before a row of the ledger names the cut."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
from blake3 import blake3

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.plans import SLICES_ARROW, write_slices
from dlac_pipeline.plan.cut import PassCut
from dlac_pipeline.plan.order import LegOrder


class SliceWriter:
    """Writer of the slices of a leg's passes, each pass once. `order` is used here only, because of its caches."""

    def __init__(self, lakehouse: Lakehouse, order: LegOrder) -> None:
        self._lakehouse = lakehouse
        self._order = order
        self._cut_ids: dict[tuple[int, int], str] = {}

    def write(self, passes: Iterable[tuple[int, int]]) -> Mapping[tuple[int, int], str]:
        """Write the slices of passes, by source and pass. Return the id of each cut, for rows that are committed afterwards."""
        for source, pass_index in passes:
            if (source, pass_index) not in self._cut_ids:
                order = self._order.sources[source]
                plan_id, cut = order.open_cut_of(pass_index).plan_id, order.cut_of(pass_index)
                self._cut_ids[source, pass_index] = write_cut(self._lakehouse, plan_id, cut)
        return self._cut_ids


def write_cut(lakehouse: Lakehouse, plan_id: str, cut: PassCut) -> str:
    """Write the slices of one pass over a plan, unless they exist. Return the id of the cut."""
    cut_id = cut_id_of(plan_id, cut)
    write_slices(lakehouse, cut_id, lambda: slices_arrow(cut_id, plan_id, cut))
    return cut_id


def cut_id_of(plan_id: str, cut: PassCut) -> str:
    """Content id of a cut: a digest of all that determines its slices."""
    content = [plan_id, cut.pass_index, asdict(cut.settings), cut.dealt_before.tolist()]
    return blake3(json.dumps(content, sort_keys=True).encode()).hexdigest(length=12)


def slices_arrow(cut_id: str, plan_id: str, cut: PassCut) -> pa.Table:
    """All slices of a pass, with the schema of `slices`."""
    blocks = [
        (group, cut.block(group, index))
        for group in range(cut.settings.key_groups)
        for index in range(cut.block_count(group))
    ]
    if not blocks:
        return SLICES_ARROW.empty_table()
    counts = np.array([len(block.slices.unit) for _, block in blocks], dtype=np.int64)
    per_block = {
        "key_group": [group for group, _ in blocks],
        "block": [block.index for _, block in blocks],
        "block_rows": [block.rows for _, block in blocks],
        "block_live_rows": [block.live_rows for _, block in blocks],
        "a": [block.permutation.a for _, block in blocks],
        "a_inv": [block.permutation.a_inv for _, block in blocks],
        "c": [block.permutation.c for _, block in blocks],
    }
    per_slice = {
        "unit": [block.slices.unit for _, block in blocks],
        "first_row": [block.slices.first for _, block in blocks],
        "rows": [block.slices.rows for _, block in blocks],
        "live_rows": [block.slices.live for _, block in blocks],
        "base": [block.base for _, block in blocks],
    }
    total = int(counts.sum())
    arrays: dict[str, Any] = {
        "cut_id": pa.repeat(cut_id, total),
        "plan_id": pa.repeat(plan_id, total),
        "pass": pa.repeat(cut.pass_index, total),
        "slice": np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts),
    }
    arrays |= {name: np.repeat(np.array(values, dtype=np.int64), counts) for name, values in per_block.items()}
    arrays |= {name: np.concatenate(values) for name, values in per_slice.items()}
    return pa.table(arrays).select(SLICES_ARROW.names).cast(SLICES_ARROW)
