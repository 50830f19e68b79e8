"""Assembly of batches: rows of decoded columns become the tensors of a batch, or of several full batches at once."""

import math
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from dlac_pipeline.lakehouse.errors import UnsupportedColumn
from dlac_pipeline.read.memory import Buffers
from dlac_pipeline.rows.columns import Array, Column, ColumnKind, Ints

_CALL_BYTES = 2**14
"""Copies of so many bytes let other threads run."""
Piece = tuple[Column, Ints, Ints]
"""Rows of a column, and the slots of the batch that they go to, one slot per row."""


def assemble(
    kind: ColumnKind, pieces: Sequence[Piece], slots: int, buffers: Buffers, *, length: int = 0
) -> dict[str, Array]:
    """Return the tensors of one column of a batch of `slots` samples, as new arrays. Slots without a row are zeros or empty.

    `length` is the length of the lists of a batch without rows.

    Raises `UnsupportedColumn` if the pieces contain lists of different lengths.
    """
    pieces = [piece for piece in pieces if len(piece[1])]
    found = _ragged(kind, pieces, slots, buffers) if kind.ragged else {kind.name: _dense(kind, pieces, slots, length)}
    if kind.nullable:
        valid = np.zeros(slots, dtype=np.bool_)
        for column, rows, at in pieces:
            valid[at] = True if column.valid is None else column.valid[rows]
        found[f"{kind.name}.valid"] = valid
    return found


RunPiece = tuple[Column, Ints | slice, Ints | int, slice]
"""Rows of a column, the places that they fill (batch * width + slot, or the first of consecutive ones), and their slots."""


BatchArrays = Array | list[Array]
"""An array for each of several batches."""


def assemble_run(
    kind: ColumnKind, pieces: Sequence[RunPiece], batches: int, slots: int, buffers: Buffers, *, length: int = 0
) -> dict[str, BatchArrays]:
    """Return a column for full batches, in leased arrays [batches, slots, ...]. Raises as `assemble`."""
    make = _ragged_run if kind.ragged else partial(_dense_run, length=length)
    found = make(kind, pieces, batches, slots, buffers)
    if kind.nullable:
        valid = np.ones((batches, slots), dtype=np.bool_)
        for column, rows, places, span in pieces:
            if column.valid is not None:
                _spread(valid[:, span], column.valid, rows, places)
        found[f"{kind.name}.valid"] = valid
    return found


def _dense_run(
    kind: ColumnKind, pieces: Sequence[RunPiece], batches: int, slots: int, buffers: Buffers, *, length: int
) -> dict[str, BatchArrays]:
    shape = _shape(kind, [column for column, _, _, _ in pieces], length)
    leased = buffers.lease(batches * slots * math.prod(shape) * kind.items.itemsize)
    values = leased.view(kind.items).reshape(batches, slots, *shape)
    for column, rows, places, span in pieces:
        if column.values.shape[1:] == shape:
            _spread(values[:, span], column.values, rows, places)
        else:  # only nulls, of no length
            _spread(values[:, span], np.zeros((column.rows, *shape), dtype=kind.items), rows, places)
    return {kind.name: values}


def _spread(out: Array, values: Array, rows: Ints | slice, places: Ints | int) -> None:
    """Copy rows of `values` [rows, ...] to their places in `out` [batches, width, ...]."""
    mine, width = values[rows], out.shape[1]
    if not isinstance(places, int):
        out[places // width, places % width] = mine
        return
    batch, slot = divmod(places, width)
    if slot:
        head = min(len(mine), width - slot)
        out[batch, slot : slot + head] = mine[:head]
        batch, mine = batch + 1, mine[head:]
    full = len(mine) // width
    out[batch : batch + full] = mine[: full * width].reshape(full, *out.shape[1:])
    if len(mine) > full * width:
        out[batch + full, : len(mine) - full * width] = mine[full * width :]


def _dense(kind: ColumnKind, pieces: Sequence[Piece], slots: int, length: int) -> Array:
    shape = _shape(kind, [column for column, _, _ in pieces], length)
    full = sum(len(at) for _, _, at in pieces) == slots and all(c.values.shape[1:] == shape for c, _, _ in pieces)
    out = (np.empty if full else np.zeros)((slots, *shape), dtype=kind.items)
    for column, rows, at in pieces:
        if column.values.shape[1:] != shape:
            continue  # only nulls, of no length: zeros already
        span, taken = _span(at), _span(rows)
        if span is not None and taken is not None:
            out[span] = column.values[taken]  # unlike np.take this converts while it copies
        elif span is None:
            out[at] = column.values[rows]
        else:
            np.take(column.values, rows, axis=0, out=out[span], mode="clip")
    return out


def _shape(kind: ColumnKind, columns: Sequence[Column], length: int) -> tuple[int, ...]:
    shapes = {column.values.shape[1:] for column in columns if column.valid is None or column.valid.any()}
    others = sorted(shape[0] for shape in shapes if kind.length is not None and shape != (kind.length, *kind.inner))
    if others:
        raise UnsupportedColumn(
            f"expected lists of length {kind.length} in column {kind.name!r}, as the first list of the plan has, found lists of "
            f'length {others[0]}: pack them with [sequences], or declare them ragged = ["{kind.name}"]'
        )
    if len(shapes) > 1:
        raise UnsupportedColumn(
            f"expected lists of one length in column {kind.name!r}, found lengths {sorted(shape[0] for shape in shapes)!r} in "
            f'one batch: pack them with [sequences], or declare them ragged = ["{kind.name}"]'
        )
    if shapes:
        return shapes.pop()
    return shape_of(kind, length)


def shape_of(kind: ColumnKind, length: int = 0) -> tuple[int, ...]:
    """Return the shape of a row of a column. `length` is the length of its lists where the kind does not know it."""
    if kind.listed:
        return (length if kind.length is None else kind.length, *kind.inner)
    return () if kind.width is None else (kind.width,)


def as_span(indices: Ints) -> Ints | slice:
    """Return the slice that the indices are, if they are one."""
    return indices if (span := _span(indices)) is None else span


def _span(indices: Ints) -> slice | None:
    if not len(indices):
        return slice(0, 0)
    start = int(indices[0])
    if int(indices[-1]) - start + 1 != len(indices):
        return None
    consecutive = bool((indices[1:] - indices[:-1] == 1).all())
    return slice(start, start + len(indices)) if consecutive else None


def _ragged(kind: ColumnKind, pieces: Sequence[Piece], slots: int, buffers: Buffers) -> dict[str, Array]:
    values, starts = _lay_out(kind, pieces, slots, buffers)
    return {kind.name: values, f"{kind.name}.offsets": starts}


def _ragged_run(
    kind: ColumnKind, pieces: Sequence[RunPiece], batches: int, slots: int, buffers: Buffers
) -> dict[str, BatchArrays]:
    slot_of = np.arange(batches * slots, dtype=np.int64).reshape(batches, slots)
    placed = []
    for column, rows, places, span in pieces:
        at = slot_of[:, span].reshape(-1)
        count = rows.stop - rows.start if isinstance(rows, slice) else len(rows)
        placed.append((column, rows, at[places : places + count] if isinstance(places, int) else at[places]))
    values, starts = _lay_out(kind, placed, batches * slots, buffers)
    bounds = starts[::slots]
    offsets = np.concatenate([starts[:-1].reshape(batches, slots), bounds[1:, None]], axis=1) - bounds[:-1, None]
    return {
        kind.name: [values[first:last] for first, last in pairwise(bounds.tolist())],
        f"{kind.name}.offsets": offsets,
    }


def _lay_out(
    kind: ColumnKind, pieces: Sequence[tuple[Column, Ints | slice, Ints]], slots: int, buffers: Buffers
) -> tuple[Array, Ints]:
    """Return the values of all slots end to end, and where those of each slot begin, int64 [slots + 1]."""
    lengths = np.zeros(slots, dtype=np.int64)
    for column, rows, at in pieces:
        lengths[at] = column.lengths_of(rows)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = buffers.lease(int(starts[-1]) * kind.items.itemsize).view(kind.items)
    for column, rows, at in pieces:
        _copy_ragged(values, starts, column, rows, at)
    return values, starts


def _copy_ragged(out: Array, starts: Ints, column: Column, rows: Ints | slice, at: Ints) -> None:
    """Copy the values of rows to the slots `at`, whose values begin at `starts`. Neighbors that stay neighbors are one copy."""
    if column.offsets is None or not len(at):
        return
    parts = at[1:] - at[:-1] != 1
    if not isinstance(rows, slice):
        parts |= rows[1:] - rows[:-1] != 1
    breaks = np.flatnonzero(parts)
    first, last = np.concatenate([[0], breaks + 1]), np.append(breaks, len(at) - 1)
    begins, ends = column.offsets[:-1][rows][first], column.offsets[1:][rows][last]
    filled: Any = out
    values: Any = column.values
    if (ends[-1] - begins[0]) * out.itemsize < _CALL_BYTES * len(first):
        # memory views, because a slice of an array takes twice as long, but only arrays let other threads run
        filled, values = out.data, column.values.data
    places = (starts[at[first]], starts[at[last] + 1], begins, ends)
    for to, until, begin, end in zip(*(each.tolist() for each in places), strict=True):
        filled[to:until] = values[begin:end]
