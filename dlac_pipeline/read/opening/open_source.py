"""Source of a leg, opened: its decoder and transform, and how its decoded blocks become columns, samples or documents."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import pyarrow as pa
from pyiceberg.table import Table

from dlac_pipeline.lakehouse.errors import ResumeMismatch
from dlac_pipeline.lakehouse.iceberg.snapshots import check_same_table
from dlac_pipeline.plan.legs.leg import LegSequences, LegSource
from dlac_pipeline.plan.source_order import RowRange
from dlac_pipeline.read.assemble import as_span
from dlac_pipeline.read.blocks import BlockDecoder, open_decoder
from dlac_pipeline.read.joining import take_rows
from dlac_pipeline.read.layout import Segment, lay_out
from dlac_pipeline.read.packing import Packing
from dlac_pipeline.read.samples import Items, Kinds, Samples, samples_of
from dlac_pipeline.rows.columns import Column, ColumnKind, Flags, kinds_of, of_one_shape, to_column
from dlac_pipeline.rows.transform import Transform, load_transform
from dlac_pipeline.spec.job_spec import SourceSpec

Made = TypeVar("Made", bound=Items)


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenSource:
    """A source of a leg, ready to be decoded."""

    leg: LegSource
    decoder: BlockDecoder
    kinds: Mapping[str, ColumnKind]
    transform: Transform | None

    def segments(self, row_range: RowRange) -> list[Segment]:
        """Decode rows that are samples, in reading order."""
        rows = as_span(row_range.rows_of(row_range.start, row_range.stop))
        units, slices = row_range.cut.units, row_range.slices
        if isinstance(rows, slice):
            parts = self.decoder.decode_in_order(units, slices)
            decoded = {name: [part[name] for part in parts] for name in parts[0].column_names}
        else:
            decoded = self.decoder.decode_apart(units, slices)
        origin, live = _origin(row_range), _live_mask(row_range)
        columns = {name: _to_columns(decoded.pop(name), kind, origin, live) for name, kind in self.kinds.items()}
        return list(lay_out(columns, rows, row_range.start, self.decoder.buffers))

    def to_samples(self, first: dict[str, Kinds]) -> Callable[[RowRange], Samples]:
        """Return the preparation of blocks whose samples a transform makes, of the `first` kinds of its leg."""
        return self._preparation(partial(samples_of, first=first))

    def to_documents(self, sequences: LegSequences, packing: Packing) -> Callable[[RowRange], Items]:
        """Return the preparation of blocks whose rows are documents."""
        known = self.transform is not None or sequences.column in self.leg.columns
        return self._preparation(partial(packing.prepare, column=sequences.column if known else self.leg.columns[0]))

    def _preparation(self, make: Callable[..., Made]) -> Callable[[RowRange], Made]:
        """Return the preparation of blocks by a function of a block's live rows.

        The transform is checked on the first block.
        """
        checks, reject = iter([True]), "quarantine" if self.leg.on_reject == "quarantine" else "fail"

        def prepare(row_range: RowRange) -> Made:
            block, start, stop = row_range.block, row_range.start, row_range.stop
            table = self.decoder.decode(row_range.cut.units, row_range.slices)
            live, positions = take_rows(table, block.rows_of(start, stop)), block.positions_of(start, stop)
            check = next(checks, False)
            return make(live, positions, transform=self.transform, reject=reject, check=check)

        return prepare


def open_source(
    table: Table, spec: SourceSpec, mine: LegSource, snapshot_ids: Collection[int], *, packed: bool
) -> OpenSource:
    """Open one source of a leg, with the places that the spec names. Raises as `open_leg`."""
    check_same_table(spec.table, planned_uuid=mine.table_uuid, uuid=str(table.metadata.table_uuid))
    schema = table.schemas()[mine.schema_id]
    transform = load_transform(spec.transform) if spec.transform else None
    if (transform.digest if transform else "") != mine.transform:
        raise changed_since_plan("transform", spec.transform)
    kinds = {} if packed or transform else kinds_of(schema, mine.columns, mine.ragged, mine.nullable)
    return OpenSource(leg=mine, decoder=open_decoder(table, mine, snapshot_ids), kinds=kinds, transform=transform)


def changed_since_plan(what: str, name: str) -> ResumeMismatch:
    """Return the error for code or data that differs from the one with which the leg was planned."""
    return ResumeMismatch(
        f"expected the {what} with which the leg was planned, found another one at {name!r}: restore it, or start a run "
        "under another name"
    )


def _to_columns(parts: Sequence[pa.ChunkedArray], kind: ColumnKind, origin: str, live: Flags | None) -> list[Column]:
    """Return the parts of a column as arrays, with rows of one shape. Raises as `to_column`."""
    ends = np.cumsum([len(part) for part in parts])[:-1]
    mine = [None] * len(parts) if live is None else np.split(live, ends)
    columns = [to_column(part, kind, origin=origin, live=each) for part, each in zip(parts, mine, strict=True)]
    return of_one_shape(columns, mine, kind, origin)


def _live_mask(row_range: RowRange) -> np.typing.NDArray[np.bool_] | None:
    """Return the live rows of a range's slices as a mask, or None where all are live."""
    block = row_range.block
    if block.live_rows == block.rows:
        return None
    mask = np.zeros(block.rows, dtype=np.bool_)
    mask[block.rows_of(0, block.live_rows)] = True
    first = 0 if row_range.portion is None else int(block.base[row_range.portion[0]])
    mask = mask[first : first + int(row_range.slices.rows.sum())]
    return None if mask.all() else mask


def _origin(row_range: RowRange) -> str:
    """The data files of a block, for messages."""
    units = row_range.cut.units
    paths = [units.file_paths[file] for file in dict.fromkeys(units.file[row_range.block.slices.unit].tolist())]
    more = f" and {len(paths) - 3} more files" if len(paths) > 3 else ""
    return ", ".join(repr(path) for path in paths[:3]) + more
