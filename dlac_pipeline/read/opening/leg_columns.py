"""Columns of a leg's batches: their kinds as far as they are known before reading, and those of some rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.source_order import Stretch
from dlac_pipeline.plan.units import UnitTable
from dlac_pipeline.read.opening.open_source import OpenSource
from dlac_pipeline.read.streams import Columns
from dlac_pipeline.rows.columns import Column, ColumnKind


@dataclass(frozen=True, kw_only=True, slots=True)
class LegColumns:
    """Columns of the batches of an open leg."""

    leg: Leg
    order: LegOrder
    units: Mapping[str, UnitTable]
    """By plan id."""
    sources: tuple[OpenSource, ...]

    def kinds(self) -> dict[str, ColumnKind]:
        """The columns that are known beforehand: not those that a transform makes."""
        length = self.leg.sequences.length
        if not length:
            kinds = {name: kind for source in self.sources for name, kind in source.kinds.items()}
            return {name: self._with_length(kind) for name, kind in kinds.items()}
        items = {"tokens": np.int64, "document": np.int32, "position": np.int32}
        return {
            name: ColumnKind(name=name, items=np.dtype(kind), listed=True, length=length)
            for name, kind in items.items()
        }

    def _with_length(self, kind: ColumnKind) -> ColumnKind:
        """Return the kind with the length of its lists: that of the first list in the plans, the same on every rank."""
        if not kind.listed or kind.ragged:
            return kind
        for source in self.sources:
            for units in (self.units[plan_id] for plan_id in source.leg.start.live_plan_ids):
                for unit in np.flatnonzero(units.live_rows).tolist():
                    length = source.decoder.list_length(units, unit, kind.name)
                    if length is not None:
                        return replace(kind, length=length)
        return replace(kind, length=0)

    def probe(self) -> Columns:
        """Columns of some rows: for a rank that has none, what the others have."""
        if self.leg.sequences.length:
            nothing = np.zeros((0, self.leg.sequences.length), dtype=np.int64)
            return {name: Column(nothing) for name in self.kinds()}
        for index, stretch in self._first_pass():
            open_from = self.sources[index]
            table = open_from.decoder.decode(stretch.cut.units, stretch.slices)
            if not self.leg.streamed[index]:
                return open_from.to_columns()(stretch, table)
            found = open_from.to_samples()(stretch, table).columns
            if found:  # a transform may make nothing of all rows of a block
                return {name: Column(array) for name, array in found.items()}
        return {}

    def _first_pass(self) -> Iterator[tuple[int, Stretch]]:
        """(source, stretch) of everything in the first pass of each source, from the leg's beginning."""
        for index, source in enumerate(self.order.sources):
            for group in range(self.leg.key_groups):
                first: int | None = None
                for stretch in source.stretches(group, 0):
                    first = stretch.pass_index if first is None else first
                    if stretch.pass_index != first:
                        break
                    yield index, stretch
