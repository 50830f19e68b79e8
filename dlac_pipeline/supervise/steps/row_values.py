"""Values of columns in rows that are known by their work units."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dlac_pipeline.lakehouse.errors import NoSuchColumn
from dlac_pipeline.lakehouse.iceberg.snapshots import check_same_table
from dlac_pipeline.plan.cut import Slices
from dlac_pipeline.plan.legs.leg import Leg, LegSource
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.read.blocks import BlockDecoder, open_decoder
from dlac_pipeline.read.step_rows import SampleRow


def values_of(plans: Plans, leg: Leg, tables: Sequence[str], samples: Sequence[SampleRow], column: str) -> list[Any]:
    """Return the values of a column, one for each row. `tables` has the present names of the leg's tables.

    Raises:
        NoSuchColumn: a source has no such column.
        NoSuchTable, TableReplaced: a table is gone, or is not the planned one.
        UnitUnreadable: a data file is gone.
    """
    values: list[Any] = [None] * len(samples)
    parts: dict[tuple[int, str], list[int]] = {}
    for index, each in enumerate(samples):
        parts.setdefault((each.source, each.plan_id), []).append(index)
    for (source, plan_id), mine in parts.items():
        # Each row group is decoded once.
        mine.sort(key=lambda index: (samples[index].unit, samples[index].unit_row))
        decoder = _decoder(plans, replace(leg.sources[source], table=tables[source]), column)
        ones = np.ones(len(mine), dtype=np.int64)
        chosen, first = (np.array([getattr(samples[i], name) for i in mine]) for name in ("unit", "unit_row"))
        table = decoder.decode(plans.read(plan_id).units, Slices(chosen, first, ones, ones))
        for index, value in zip(mine, table[column].to_pylist(), strict=True):
            values[index] = value
    return values


def _decoder(plans: Plans, source: LegSource, column: str) -> BlockDecoder:
    """Return the decoder of one column of a source."""
    table = plans.lakehouse.load(source.table)
    check_same_table(source.table, planned_uuid=source.table_uuid, uuid=str(table.metadata.table_uuid))
    names = [field.name for field in table.schemas()[source.schema_id].fields]
    if column not in names:
        raise NoSuchColumn(
            f"expected one of the columns {names!r} of {source.table!r}, found {column!r}: name one of these"
        )
    snapshots = {plans.row(plan_id).snapshot_id for plan_id in source.start.plan_ids}
    return open_decoder(table, replace(source, columns=(column,)), snapshots)
