"""A block's live rows in, its items out: samples of dense columns, or what an extension makes of the rows.

A row gives any number of items (tokens, samples). A row that gives none is passed over: it counts as filtered, never as
consumed. A row that is rejected is passed over too, and named with the reason.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.errors import UnsupportedColumn
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.rows.columns import Array, to_numpy
from dlac_pipeline.rows.transform import Reject, Rejected, Transform, Transformed, transform_rows

Kinds = dict[str, tuple[str, tuple[int, ...]]]
"""Column of samples -> its dtype and the shape of a sample."""


@dataclass(frozen=True, slots=True, eq=False)
class SourceRows:
    """The fate of a block's live rows. Every position is in exactly one of the three."""

    positions: Ints
    """Block positions of the rows that give items, int64 [rows], increasing."""
    ends: Ints
    """Items of all rows up to and with each, int64 [rows], increasing: row i gives items ends[i-1] .. ends[i]-1."""
    filtered: Ints
    """Positions of the rows that give no item, increasing."""
    quarantined: Rejected
    """(position, reason) of the rows that were rejected, by position."""

    @property
    def items(self) -> int:
        """Items of the block."""
        return int(self.ends[-1]) if len(self.ends) else 0


class Items(Protocol):
    """Items of a block's rows, in reading order: samples, or the tokens of documents."""

    @property
    def rows(self) -> SourceRows:
        """Return the fate of the rows."""

    @property
    def nbytes(self) -> int:
        """Return the memory of the arrays."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """The samples of a block, in reading order. The items of its rows are samples."""

    columns: dict[str, Array]
    """Column -> array [samples] or [samples, length, ...]. No columns without samples."""
    rows: SourceRows

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        arrays = [*self.columns.values(), self.rows.positions, self.rows.ends]
        return int(sum(array.nbytes for array in arrays))


def samples_of(
    live: pa.Table,
    positions: Ints,
    *,
    transform: Transform | None = None,
    first: dict[str, Kinds],
    reject: Reject = "fail",
    check: bool = False,
) -> Samples:
    """Return the samples of a block's live rows, at these block positions (int64 [rows], increasing).

    Each row, or each output row of the transform, is one. `reject` decides on rows at which the transform raises. `check`
    verifies on these rows that the transform does not depend on how rows are batched. `first` gets the kinds of the columns of
    the first block with samples. All further blocks, also of other sources, must have the same kinds.

    Raises:
        RowRejected: a row was rejected and `reject` is "fail".
        TransformFailed: the transform breaks its contract.
        UnsupportedColumn: a column has other kinds, or cannot become an array.
    """
    done = run_transform(live, positions, transform, reject, check)
    rows = source_rows(positions, done.row, done.rejected)
    if not len(done.row):
        return Samples({}, rows)
    origin = "the table" if transform is None else f"transform {transform.name!r}"
    arrays = {name: to_numpy(done.table[name], name=name, origin=origin) for name in done.table.column_names}
    kinds = {name: (array.dtype.name, array.shape[1:]) for name, array in arrays.items()}
    expected = first.setdefault("first", kinds)  # atomic: several threads prepare blocks
    if kinds != expected:
        raise UnsupportedColumn(
            f"expected columns of the same types and lengths from {origin} for every block and source, found {kinds!r} "
            f"after {expected!r}: convert them in the transform"
        )
    return Samples(arrays, rows)


def source_rows(positions: Ints, row: Ints, rejected: Rejected, ends: Ints | None = None) -> SourceRows:
    """Return the fate of rows at `positions`, from the row of each document and its end, or from the row of each sample."""
    ends = np.arange(1, len(row) + 1, dtype=np.int64) if ends is None else ends
    last = np.flatnonzero(np.append(row[1:] != row[:-1], True)) if len(row) else np.zeros(0, dtype=np.int64)
    filtered = np.ones(len(positions), dtype=np.bool_)
    filtered[row[last]] = False
    filtered[np.searchsorted(positions, [position for position, _ in rejected])] = False
    return SourceRows(positions[row[last]], ends[last], positions[filtered], rejected)


def run_transform(
    live: pa.Table, positions: Ints, transform: Transform | None, reject: Reject, check: bool
) -> Transformed:
    """Return the output of the transform, or the rows themselves without one. Arguments and errors are as of `samples_of`."""
    if transform is None:
        return Transformed(live, np.arange(live.num_rows, dtype=np.int64), ())
    return transform_rows(transform, live, positions, reject=reject, check=check)
