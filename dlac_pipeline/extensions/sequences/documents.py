"""A block's live rows in, the tokens of their documents out, to be packed."""

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dlac_pipeline.extensions.sequences.tokenizing import Tokenizer, Tokens, is_text, tokens_of_lists
from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid, UnsupportedColumn
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.samples import SourceRows, run_transform, source_rows
from dlac_pipeline.rows.transform import Reject, RowRejected, Transform, Transformed


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
    done = run_transform(live, positions, transform, reject, check)
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
