"""Rows of one optimizer step, computed from the order of its leg: nothing is logged.

The samples of each key group are drawn one by one, by the reader's own `GroupReader`. Rows of counted legs are not decoded.
Those of streamed legs are, from the given reader state on, because a transform or packing decides how many items they have.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from dlac_pipeline.plan.cut import Block
from dlac_pipeline.plan.order import LegOrder, ReaderState
from dlac_pipeline.plan.source_order import Cursor, RowRange, SourceOrder
from dlac_pipeline.read.group import GroupReader, GroupSlots, OpenStream
from dlac_pipeline.read.line import BlockAdvance
from dlac_pipeline.read.streams import Columns, RowStream


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRow:
    """One row of a sample of a global batch. A packed sample has many rows, and a long row is in several samples."""

    slot: int
    """Place of the sample in the global batch, from 0."""
    source: int
    key_group: int
    pass_index: int
    unit: int
    """Work unit of the plan `plan_id`."""
    plan_id: str
    unit_row: int
    """Row in the work unit."""
    file_path: str
    row_group: int
    row: int
    """Row in the data file."""
    first_item: int | None
    """First item of the row in this step, where the row began in an earlier sample."""
    end_item: int | None
    """End of the row's items in this sample, where the row has more."""


class _Undecoded:
    """The blocks of a key group from a cursor on, without their rows."""

    def __init__(self, order: SourceOrder, group: int, cursor: Cursor) -> None:
        self._row_ranges = order.row_ranges(group, order.consumed_at(group, cursor))
        self._upcoming = next(self._row_ranges, None)

    def __next__(self) -> tuple[RowRange, Columns]:
        """Return the next range, and no columns."""
        row_range = self._upcoming
        if row_range is None:
            raise StopIteration
        self._upcoming = next(self._row_ranges, None)
        return row_range, {}

    @property
    def is_ended(self) -> bool:
        """True if no block follows."""
        return self._upcoming is None

    def close(self) -> None:
        """Do nothing: no block is held."""


def undecoded_streams(order: LegOrder) -> OpenStream:
    """Return the function that opens streams of rows which are not decoded. Counted legs only."""
    return lambda source, group, cursor: RowStream(_Undecoded(order.sources[source], group, cursor), cursor)


def sample_rows(
    order: LegOrder, step: int, *, since: int, state: ReaderState, open_stream: OpenStream
) -> Iterator[SampleRow]:
    """Yield the rows of the samples of a step, by slot. `state` has the cursors after step `since`, which is before `step`."""
    per_group = order.settings.samples_per_group
    for group in range(order.settings.key_groups):
        reader = GroupReader(
            order.mixture,
            order.active,
            GroupSlots(group=group, slots=1, low=0, high=1),
            samples_before=order.samples(since),
            cursors=[cursors[group] for cursors in state],
            open_stream=open_stream,
        )
        for _ in range((step - 1 - since) * per_group):
            reader.take(give=False)
        for index in range(per_group):
            for source, advance in reader.take().advances:
                yield from _rows_of(order.sources[source], source, group, group * per_group + index, advance)


def _rows_of(order: SourceOrder, source: int, group: int, slot: int, advance: BlockAdvance) -> Iterator[SampleRow]:
    """Yield the rows that an advance of one sample consumed."""
    cut = order.cut_of(advance.pass_index)
    block = cut.block(group, advance.block)
    for position in _positions_of(block, advance):
        unit, unit_row = block.place_of(position)
        file_path, row_group = cut.units.place(unit)
        is_first, is_last = position == advance.position_start, position == advance.position_end - 1
        yield SampleRow(
            slot=slot,
            source=source,
            key_group=group,
            pass_index=advance.pass_index,
            unit=unit,
            plan_id=order.open_cut_of(advance.pass_index).plan_id,
            unit_row=unit_row,
            file_path=file_path,
            row_group=row_group,
            row=int(cut.units.first_row[unit]) + unit_row,
            first_item=advance.token_start if is_first else None,
            end_item=advance.token_end if is_last else None,
        )


def _positions_of(block: Block, advance: BlockAdvance) -> Sequence[int]:
    """Return the positions of the live rows of an advance of which a sample has items."""
    live = block.positions_of(block.live_until(advance.position_start), block.live_until(advance.position_end))
    left_out = [*advance.filtered.tolist(), *(position for position, _ in advance.quarantined)]
    found: list[int] = np.setdiff1d(live, left_out).tolist()
    return found
