"""Rows of one optimizer step, computed from the order of its leg. See docs/design/0023-questions.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from dlac_pipeline.plan.cut import Block
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.source_order import Cursor, SourceOrder
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.group import GroupBatch, GroupReader, GroupSlots, OpenStream
from dlac_pipeline.read.line import BlockAdvance
from dlac_pipeline.read.streams import RowStream, UndecodedWalk


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """A row of a sample of a global batch. A packed sample has many rows, and a long row is in several samples."""

    slot: int
    """Place of the sample in the global batch, from 0."""
    source: int
    key_group: int
    pass_index: int
    unit: int
    """Work unit of the plan `plan_id`."""
    plan_id: str
    unit_row: int
    file_path: str
    row_group: int
    row: int
    """Row in the data file."""
    first_item: int | None
    """First item of the row in this step, where the row began in an earlier sample."""
    end_item: int | None
    """End of the row's items in this sample, where the row has more."""


def undecoded_streams(order: LegOrder) -> OpenStream:
    """Return the function that opens streams of rows which are not decoded. Counted legs only."""

    def open_stream(source: int, group: int, cursor: Cursor) -> RowStream:
        mine = order.sources[source]
        return RowStream(UndecodedWalk(mine.row_ranges(group, mine.consumed_at(group, cursor))), cursor)

    return open_stream


def sample_rows(
    order: LegOrder, step: int, slots: range, *, since: int, state: ReaderState, open_stream: OpenStream
) -> Iterator[SampleRow]:
    """Yield the rows of the samples in some slots of a step, by slot.

    `state` has the cursors after step `since`, which is before `step`.
    """
    per_group = order.settings.samples_per_group
    at_once = per_group if order.counted else 1  # one advance may be about several samples of a streamed source
    for group in range(slots.start // per_group, -(-slots.stop // per_group)):
        reader = GroupReader(
            order.mixture,
            order.active,
            GroupSlots(group=group, slots=at_once, low=0, high=at_once),
            samples_before=order.samples(since),
            cursors=[cursors[group] for cursors in state],
            open_stream=open_stream,
        )
        for _ in range((step - 1 - since) * per_group // at_once):
            reader.take(give=False)
        for first in range(group * per_group, (group + 1) * per_group, at_once):
            taken = reader.take()
            places = [_slots_of(taken, source, first, counted=order.counted) for source in range(len(state))]
            rows = [
                row
                for source, advance in taken.advances
                for row in _rows_of(order.sources[source], source, group, places[source], advance)
                if row.slot in slots
            ]
            yield from sorted(rows, key=lambda each: each.slot)
        reader.close()


def _slots_of(taken: GroupBatch, source: int, first: int, *, counted: bool) -> Iterator[int]:
    """Return the slots of the rows of a source, in their order. A streamed sample, taken alone, has all of its rows."""
    return iter((np.flatnonzero(taken.source_of == source) + first).tolist()) if counted else repeat(first)


def _rows_of(
    order: SourceOrder, source: int, group: int, slots: Iterator[int], advance: BlockAdvance
) -> Iterator[SampleRow]:
    cut = order.cut_of(advance.pass_index)
    block = cut.block(group, advance.block)
    plan_id = order.open_cut_of(advance.pass_index).plan_id
    positions = _positions_of(block, advance)
    units, unit_rows = block.places_of(positions)
    rows = cut.units.first_row[units] + unit_rows
    for position, unit, unit_row, row in zip(
        *(each.tolist() for each in (positions, units, unit_rows, rows)), strict=True
    ):
        file_path, row_group = cut.units.place(unit)
        yield SampleRow(
            slot=next(slots),
            source=source,
            key_group=group,
            pass_index=advance.pass_index,
            unit=unit,
            plan_id=plan_id,
            unit_row=unit_row,
            file_path=file_path,
            row_group=row_group,
            row=row,
            first_item=advance.token_start if position == advance.position_start else None,
            end_item=advance.token_end if position == advance.position_end - 1 else None,
        )


def _positions_of(block: Block, advance: BlockAdvance) -> Ints:
    """Return the positions of an advance's live rows from which a sample has items."""
    live = block.positions_of(block.live_until(advance.position_start), block.live_until(advance.position_end))
    left_out = [*advance.filtered.tolist(), *(position for position, _ in advance.quarantined)]
    return np.setdiff1d(live, left_out) if left_out else live
