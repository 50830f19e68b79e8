"""A block's live rows in, its items out: documents of tokens to be packed, or samples of dense columns.

A row gives any number of items (tokens, samples). A row that gives none is passed over: it counts as filtered, never as
consumed. A row that is rejected is passed over too, and named with the reason.
"""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid, UnsupportedColumn
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.rows.columns import Array, to_numpy
from dlac_pipeline.rows.tokenizing import Tokenizer, Tokens, is_text, tokens_of_lists
from dlac_pipeline.rows.transform import Reject, Rejected, RowRejected, Transform, Transformed, transform_rows

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


@dataclass(frozen=True, slots=True, eq=False)
class Documents:
    """The tokens of a block, in reading order. The items of its rows are tokens."""

    values: Tokens
    """Token ids of all documents end to end, int32 or int64 [tokens]."""
    ends: Ints
    """End of each document in `values`, int64 [documents], increasing: no document is empty."""
    rows: SourceRows

    @property
    def nbytes(self) -> int:
        """Memory of the arrays."""
        return int(self.values.nbytes + self.ends.nbytes + self.rows.positions.nbytes + self.rows.ends.nbytes)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """How a document becomes tokens."""

    tokenizer: Tokenizer | None = None
    """None: it is tokens."""
    begin_id: int | None = None
    end_id: int | None = None
    """Tokens that are put before and after it. An empty document stays empty."""


def documents_of(
    live: pa.Table,
    positions: Ints,
    *,
    column: str,
    transform: Transform | None = None,
    encoding: Encoding = Encoding(),
    reject: Reject = "fail",
    check: bool = False,
) -> Documents:
    """Return the documents of a block's live rows, at these block positions (int64 [rows], increasing).

    `column` has texts, to be tokenized, or lists of integers, which are tokens, after the transform. `reject` decides
    on rows at which the transform or the tokenizer raises. `check` verifies on these rows that the transform does not depend on
    how rows are batched.

    Raises:
        RowRejected: a row was rejected and `reject` is "fail".
        TransformFailed: the transform breaks its contract.
        NoSuchColumn: `column` does not exist.
        SpecInvalid: a string column and no tokenizer.
        UnsupportedColumn: another type, or nulls.
    """
    done = _transformed(live, positions, transform, reject, check)
    if not len(done.row):
        return Documents(np.zeros(0, np.int32), np.zeros(0, np.int64), source_rows(positions, done.row, done.rejected))
    content = _column(done.table, column)
    if is_text(content.type):
        values, offsets, done = _tokenized(content, done, positions, column, encoding.tokenizer, reject)
    else:
        values, offsets = tokens_of_lists(content, column)
    kept = np.diff(offsets) > 0
    ends, row = offsets[1:][kept], done.row[kept]
    if encoding.end_id is not None or encoding.begin_id is not None:
        values, ends = _framed(values, ends, encoding.begin_id, encoding.end_id)
    return Documents(values, ends, source_rows(positions, row, done.rejected, ends))


def samples_of(
    live: pa.Table,
    positions: Ints,
    *,
    transform: Transform | None = None,
    first: dict[str, Kinds],
    reject: Reject = "fail",
    check: bool = False,
) -> Samples:
    """Return a block's samples: each row, or each output row of the transform, is one. Arguments and errors as of `documents_of`.

    `first` gets the kinds of the columns of the first block with samples. All further blocks, also of other
    sources, must have the same kinds.
    """
    done = _transformed(live, positions, transform, reject, check)
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


def _transformed(
    live: pa.Table, positions: Ints, transform: Transform | None, reject: Reject, check: bool
) -> Transformed:
    if transform is None:
        return Transformed(live, np.arange(live.num_rows, dtype=np.int64), ())
    return transform_rows(transform, live, positions, reject=reject, check=check)


def _column(table: pa.Table, name: str) -> pa.ChunkedArray:
    if name not in table.column_names:
        raise NoSuchColumn.of("sequences.column, as the transform returns them", name, table.column_names)
    column = table[name]
    if column.null_count:
        raise UnsupportedColumn(
            f"expected no nulls in column {name!r}, found {column.null_count}: filter them out with "
            f'row_filter = "{name} IS NOT NULL", or drop or fill them in the transform'
        )
    return column


def _tokenized(
    texts: pa.ChunkedArray, done: Transformed, positions: Ints, name: str, tokenizer: Tokenizer | None, reject: Reject
) -> tuple[Tokens, Ints, Transformed]:
    """Return tokens and offsets of the texts. Rows with a text at which the tokenizer raises are left out and named."""
    if tokenizer is None:
        raise SpecInvalid(f"expected a tokenizer for column {name!r}, found none and texts: name one")
    array = texts.cast(pa.large_string()).combine_chunks()
    array = array if isinstance(array, pa.Array) else pa.concat_arrays(array.chunks)
    try:
        return *tokenizer.encode(array), done
    except MemoryError:
        raise  # not the fault of a text
    except Exception as err:
        bad = _bad_rows(array, done.row, tokenizer)
        if not bad:
            raise
        position = int(positions[min(bad)])
        if reject == "fail":
            raise RowRejected(
                position,
                f"expected column {name!r} to hold texts that can be tokenized, found {bad[min(bad)]} for the row at "
                f'position {position}: drop such rows, or choose on_reject = "quarantine"',
            ) from err
    kept = ~np.isin(done.row, list(bad))
    rejected = [*done.rejected, *((int(positions[row]), reason) for row, reason in bad.items())]
    values, offsets = tokenizer.encode(array.filter(pa.array(kept)))
    return values, offsets, Transformed(done.table.filter(pa.array(kept)), done.row[kept], tuple(sorted(rejected)))


def _bad_rows(texts: pa.LargeStringArray, row: Ints, tokenizer: Tokenizer) -> dict[int, str]:
    """Row -> reason of each row with a text that the tokenizer raises for."""
    bad: dict[int, str] = {}
    for index in range(len(texts)):
        try:
            tokenizer.encode(texts.slice(index, 1))
        except Exception as err:  # only after a batch was rejected
            bad.setdefault(int(row[index]), f"{type(err).__name__}: {err}")
    return bad


def _framed(values: Tokens, ends: Ints, begin_id: int | None, end_id: int | None) -> tuple[Tokens, Ints]:
    extra = (begin_id is not None) + (end_id is not None)
    framed_ends = ends + extra * np.arange(1, len(ends) + 1, dtype=np.int64)
    framed = np.empty(len(values) + extra * len(ends), dtype=values.dtype)
    own = np.ones(len(framed), dtype=np.bool_)
    if end_id is not None:
        framed[framed_ends - 1] = end_id
        own[framed_ends - 1] = False
    if begin_id is not None:
        begins = np.concatenate(([0], framed_ends[:-1])).astype(np.int64)[: len(ends)]
        framed[begins] = begin_id
        own[begins] = False
    framed[own] = values
    return framed, framed_ends
