"""Assembly of batches: rows of decoded columns become the tensors of a batch, or of several full batches at once."""

import math
from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.errors import UnsupportedColumn
from dlac_pipeline.read.memory import Buffers
from dlac_pipeline.rows.columns import Array, Column, ColumnKind, Ints

_ONE_BY_ONE_BYTES = 512
"""Values of this length on average are copied one by one: Arrow would copy them once more, together."""
_CALL_BYTES = 2**13
"""Rows of fewer bytes are not worth a call of their own: they are gathered with those of other batches, then copied."""
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


RunPiece = tuple[Column, Ints, Ints | None, slice]
"""Rows of a column, the places that they fill, batch * width + slot (None: all of them, in order), and their slots."""


def assemble_run(
    kind: ColumnKind, pieces: Sequence[RunPiece], batches: int, slots: int, buffers: Buffers, *, length: int = 0
) -> dict[str, Array]:
    """Return a column that is not ragged, for full batches, in leased arrays [batches, slots, ...]. Raises as `assemble`."""
    shape = _shape(kind, [column for column, _, _, _ in pieces], length)
    leased = buffers.lease(batches * slots * math.prod(shape) * kind.items.itemsize)
    values = leased.view(kind.items).reshape(batches, slots, *shape)
    valid = np.ones((batches, slots), dtype=np.bool_)
    for column, rows, places, span in pieces:
        if column.values.shape[1:] == shape:
            _spread(values[:, span], column.values, rows, places)
        else:  # only nulls, of no length
            _spread(values[:, span], np.zeros((column.rows, *shape), dtype=kind.items), rows, places)
        if column.valid is not None:
            _spread(valid[:, span], column.valid, rows, places)
    return {kind.name: values, f"{kind.name}.valid": valid} if kind.nullable else {kind.name: values}


def _spread(out: Array, values: Array, rows: Ints, places: Ints | None) -> None:
    """Copy rows of `values` [rows, ...] to their places in `out` [batches, width, ...]."""
    if places is not None:
        out[places // out.shape[1], places % out.shape[1]] = values[rows]
        return
    taken = _span(rows)
    if taken is not None:
        out[:] = values[taken].reshape(out.shape)
        return
    if out[0].nbytes < _CALL_BYTES:
        out[:] = np.take(values, rows, axis=0, mode="clip").reshape(out.shape)
        return
    for batch, mine in zip(out, rows.reshape(out.shape[:2]), strict=True):
        if values.dtype == out.dtype:
            # Mode "clip" lets numpy write into `out` without a buffer between; rows are in range.
            np.take(values, mine, axis=0, out=batch, mode="clip")
        else:
            batch[:] = values[mine]


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


def _span(indices: Ints) -> slice | None:
    """The slice that the indices are, if they are one."""
    start = int(indices[0])
    if int(indices[-1]) - start + 1 != len(indices):
        return None
    consecutive = bool((indices[1:] - indices[:-1] == 1).all())
    return slice(start, start + len(indices)) if consecutive else None


def _ragged(kind: ColumnKind, pieces: Sequence[Piece], slots: int, buffers: Buffers) -> dict[str, Array]:
    lengths = np.zeros(slots, dtype=np.int64)
    for column, rows, at in pieces:
        lengths[at] = (column.offsets[1:] - column.offsets[:-1])[rows] if column.offsets is not None else 0
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    values = buffers.lease(int(offsets[-1]) * kind.items.itemsize).view(kind.items)
    if values.nbytes >= _ONE_BY_ONE_BYTES * slots:
        for column, rows, at in pieces:
            _copy_one_by_one(values, offsets[at], column, rows)
    elif len(values):
        taken = pa.concat_arrays([_taken(column, rows) for column, rows, _ in pieces])
        order = np.concatenate([at for _, _, at in pieces])
        if (np.diff(order) < 0).any():
            taken = taken.take(pa.array(np.argsort(order)))
        ends = np.frombuffer(taken.buffers()[1], dtype=np.int64)[taken.offset : taken.offset + len(taken) + 1]
        values[:] = np.frombuffer(taken.buffers()[2], dtype=np.uint8)[ends[0] : ends[-1]].view(kind.items)
    return {kind.name: values, f"{kind.name}.offsets": offsets}


def _copy_one_by_one(out: Array, starts: Ints, column: Column, rows: Ints) -> None:
    """Copy the values of rows to `out`, from `starts` on."""
    if column.offsets is None:
        return
    begins, ends = column.offsets[rows], column.offsets[rows + 1]
    for to, begin, end in zip(starts.tolist(), begins.tolist(), ends.tolist(), strict=True):
        out[to : to + end - begin] = column.values[begin:end]


def _taken(column: Column, rows: Ints) -> pa.LargeBinaryArray:
    """Rows of a ragged column as byte strings, which Arrow copies row by row without Python."""
    assert column.offsets is not None
    offsets = pa.py_buffer(np.ascontiguousarray(column.offsets * column.values.itemsize))
    values = pa.py_buffer(np.ascontiguousarray(column.values).view(np.uint8))
    array = pa.LargeBinaryArray.from_buffers(pa.large_binary(), column.rows, [None, offsets, values])
    span = _span(rows)
    return array.take(pa.array(rows)) if span is None else array[span]
