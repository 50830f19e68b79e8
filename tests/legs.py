"""Legs and orders for tests that need no lakehouse."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from dlac_pipeline.plan.legs.leg import Leg, LegSource
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.source_order import SourceStart
from dlac_pipeline.plan.units import UnitTable


def units_of(rows: Sequence[int], dead: dict[int, list[int]] | None = None) -> UnitTable:
    """Return units of one file with these rows and dead offsets."""
    counts = np.array(rows, dtype=np.int64)
    return UnitTable(
        file_paths=["f"],
        file=np.zeros(len(counts), dtype=np.int64),
        row_group=np.arange(len(counts)),
        first_row=np.cumsum(counts) - counts,
        rows=counts,
        dead={unit: np.array(offsets, dtype=np.int64) for unit, offsets in (dead or {}).items()},
        bytes=counts * 8,
    )


def source_of(plan_id: str = "p", *, key_groups: int = 4, passes: int = 1, **changes: Any) -> LegSource:
    """Return a source without any read row."""
    fields: dict[str, Any] = {
        **{"name": f"src.{plan_id}", "table": f"src.{plan_id}", "table_uuid": f"uuid-{plan_id}"},
        **{"snapshot_id": 9007199254740993, "schema_id": 0, "plan_id": plan_id, "columns": ("row_id", "x")},
        **{"row_filter": "x > 'ü'", "passes": passes, "start": SourceStart.fresh(key_groups, [(plan_id, passes)])},
    }
    return LegSource(**{**fields, **changes})


def leg_of(*sources: LegSource, **changes: Any) -> Leg:
    """Return a leg of these sources, or of one default source."""
    key_groups = changes.get("key_groups", 4)
    fields: dict[str, Any] = {
        **{"index": 0, "start_step": 0, "seed": 2**62 + 1, "key_groups": key_groups, "batch_size": 2 * key_groups},
        **{"block_slices": 2, "shuffle": True, "sources": sources or (source_of(key_groups=key_groups),)},
    }
    return Leg(**{**fields, **changes})


def order_of(units: UnitTable, passes: int = 1, **changes: Any) -> LegOrder:
    """Return the order of a leg over one plan."""
    return leg_of(source_of(key_groups=changes.get("key_groups", 4), passes=passes), **changes).order({"p": units})
