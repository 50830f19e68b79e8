"""Opening of a leg for a rank's reader: plans and sources are opened, and checked against the leg."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby, islice

import numpy as np

from dlac_pipeline.plan.legs.choice import check_alike, open_tokenizer
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.plan import Plan, Plans
from dlac_pipeline.plan.slots import ALL_SLOTS, DataCoordinate
from dlac_pipeline.plan.source_order import RowRange
from dlac_pipeline.plan.units import UnitTable
from dlac_pipeline.read.memory import Buffers
from dlac_pipeline.read.opening.open_source import OpenSource, changed_since_plan, open_source
from dlac_pipeline.read.packing import Packing, open_packing
from dlac_pipeline.read.prefetch import Prefetcher
from dlac_pipeline.read.reader import BatchReader, Exchange, ReadStart, alone, open_streams
from dlac_pipeline.read.streams import Columns
from dlac_pipeline.rows.columns import Column, ColumnKind
from dlac_pipeline.spec.job_spec import JobSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenLeg:
    """A leg whose plans and tables are open. It makes readers for any share."""

    leg: Leg
    spec: JobSpec
    order: LegOrder
    units: Mapping[str, UnitTable]
    """Plan id -> its units."""
    sources: tuple[OpenSource, ...]
    packing: Packing | None
    """None: the samples are no packed documents."""

    def order_apart(self) -> LegOrder:
        """Return the same order again, for another thread: an order computes its cuts on demand."""
        return self.leg.order(self.units)

    def start_state(self) -> ReaderState:
        """The reader state with which the leg begins."""
        return [list(source.start.cursors) for source in self.leg.sources]

    def reader(
        self,
        *,
        coordinate: DataCoordinate = ALL_SLOTS,
        step: int | None = None,
        state: ReaderState | None = None,
        exchange: Exchange = alone,
        budget_bytes: int | None = None,
        uneven: bool = False,
    ) -> BatchReader:
        """Return the reader of one share, from after `step` (unset: the leg's beginning). A streamed leg needs `state`.

        `budget_bytes` defaults to the spec's budget.

        Raises `SpecInvalid` if the number of readers does not divide the batch size, unless shares may be `uneven`.
        """
        step = self.leg.start_step if step is None else step
        if state is None:
            state = self.start_state() if step == self.leg.start_step else self.order.reader_state(step)
        read = self.spec.read
        budget_bytes = read.budget_mb * 2**20 if budget_bytes is None else budget_bytes
        batches = Buffers()
        prefetch = Prefetcher(
            threads=read.threads,
            # the rest is for uncounted memory, such as the rounding of allocators
            budget_bytes=budget_bytes * 15 // 16,
            beside_bytes=lambda: batches.nbytes + sum(source.decoder.shared_bytes for source in self.sources),
        )
        return BatchReader(
            self,
            open_streams(self, prefetch),
            prefetch,
            batches,
            ReadStart(coordinate=coordinate, step=step, state=state, uneven=uneven),
            exchange=exchange,
        )

    def kinds(self) -> dict[str, ColumnKind]:
        """Return the columns that are known beforehand: columns that a transform makes are not."""
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
        """Return the kind with the length of its lists: the length of the first list in the plans, the same on every rank."""
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
        """Return columns of some rows: a rank without rows learns the kinds of its batches from them."""
        if self.leg.sequences.length:
            nothing = np.zeros((0, self.leg.sequences.length), dtype=np.int64)
            return {name: Column(nothing) for name in self.kinds()}
        for index, row_range in self._first_pass():
            open_from = self.sources[index]
            if not self.leg.streamed[index]:
                return open_from.segments(row_range)[0].columns
            found = open_from.to_samples({})(row_range).columns
            if found:  # a transform may make nothing of all rows of a block
                return {name: Column(array) for name, array in found.items()}
        return {}

    def _first_pass(self) -> Iterator[tuple[int, RowRange]]:
        """(source, row_range) of everything in the first pass of each source, from the leg's beginning."""
        for index, source in enumerate(self.order.sources):
            for group in range(self.leg.key_groups):
                by_pass = groupby(source.row_ranges(group, 0), key=lambda row_range: row_range.pass_index)
                for _, row_ranges in islice(by_pass, 1):
                    yield from ((index, row_range) for row_range in row_ranges)


def open_leg(plans: Plans, leg: Leg, spec: JobSpec) -> OpenLeg:
    """Open a leg, with the places that the spec names.

    Raises:
        TableReplaced, PinLost: a table is not the planned one, or its pin is gone.
        ResumeMismatch: the transform or the tokenizer is not the bound one.
        UnsupportedColumn, NoSuchColumn: a column cannot become a tensor.
    """
    read: dict[str, Plan] = {}
    sources = []
    for source, mine in zip(spec.sources, leg.sources, strict=True):
        own = {plan_id: plans.load(plan_id, table=source.table) for plan_id in mine.start.plan_ids}
        read |= own
        table, snapshots = plans.lakehouse.load(source.table), {plan.row.snapshot_id for plan in own.values()}
        sources.append(open_source(table, source, mine, snapshots, packed=bool(leg.sequences.length)))
    check_alike({source.leg.name: source.kinds for source in sources if source.kinds})
    tokenizer = open_tokenizer(spec.sequences.tokenizer) if leg.sequences.tokenizer else None
    if tokenizer is not None and tokenizer.digest != leg.sequences.tokenizer:
        raise changed_since_plan("tokenizer", spec.sequences.tokenizer)
    units = {plan_id: plan.units for plan_id, plan in read.items()}
    packing = open_packing(leg.sequences, tokenizer) if leg.sequences.length else None
    return OpenLeg(leg=leg, spec=spec, order=leg.order(units), units=units, sources=tuple(sources), packing=packing)
