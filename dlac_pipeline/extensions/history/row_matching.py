"""Matching of rows between data files: by v3 row id, or by declared identity columns.

In: data files, each with its chosen rows. Out: one mask per file. Only the key columns are read, in batches. DuckDB joins 16
bytes of digest per row and spills to disk past its memory limit. A mask is one byte per row.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.table import Table

from dlac_pipeline.extensions.history.row_keys import Keys, key_columns, spilling_duckdb
from dlac_pipeline.lakehouse.errors import AppendHistoryLost, DataFileUnreadable, DlacError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.columns import arrow_type
from dlac_pipeline.lakehouse.iceberg.data_files import LiveFile

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection  # whose import costs each launch time, and its end a page of warnings

Mask = npt.NDArray[np.bool_]
_BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one data file: `chosen` is a mask over its positions. `where` names it in messages."""

    file: LiveFile
    chosen: Mask
    where: str


def match(
    table: Table, old: Sequence[Rows], new: Sequence[Rows], keys: Keys, *, memory_bytes: int = 1 << 30
) -> tuple[list[Mask], list[Mask]]:
    """Return the `old` rows that are among the `new` ones, and the new among the old: a mask per file, by position.

    Raises:
        SpecInvalid: two rows of one side have the same identity, and a row of the opposite side has it too.
        AppendHistoryLost: as before, with row ids.
        DataFileUnreadable: a data file cannot be read.
    """
    sides = _Side(table, old, keys), _Side(table, new, keys)
    if not (sides[0].wanted and sides[1].wanted):
        return sides[0].masks(), sides[1].masks()
    with spilling_duckdb(memory_bytes) as connection:
        pairs = _join(connection, *sides)
        if any(pairs != side.found_rows for side in sides):
            raise _twice(connection, sides, keys)
    return sides[0].masks(), sides[1].masks()


def _join(connection: "DuckDBPyConnection", old: "_Side", new: "_Side") -> int:
    """Mark the matching rows. Return the number of pairs, which exceeds the rows of a side with a repeated key."""
    for name, side in (("old", old), ("new", new)):
        connection.register(name, side.reader())
    query = (
        f'SELECT old."row" AS old, new."row" AS new FROM (SELECT "row", {old.key} AS key FROM old) AS old '
        f'JOIN (SELECT "row", {new.key} AS key FROM new) AS new ON old.key IS NOT DISTINCT FROM new.key'
    )
    pairs = 0
    with _failure_of(old, new):
        for batch in connection.sql(query).to_arrow_reader(_BATCH_ROWS):
            pairs += batch.num_rows
            old.found[batch.column("old").to_numpy()] = True
            new.found[batch.column("new").to_numpy()] = True
    return pairs


@dataclass
class _Side:
    """Side of a join: its rows numbered through, `row`, in the order of its files."""

    table: Table
    rows: Sequence[Rows]
    keys: Keys
    found: Mask = field(init=False)
    failure: DlacError | None = None

    def __post_init__(self) -> None:
        self.found = np.zeros(sum(one.file.rows for one in self.rows), dtype=np.bool_)

    @property
    def wanted(self) -> bool:
        return any(one.chosen.any() for one in self.rows)

    @property
    def found_rows(self) -> int:
        return int(np.count_nonzero(self.found))

    @property
    def _types(self) -> list[pa.DataType]:
        schema, names = self.keys.read
        kinds = [arrow_type(schema.find_field(name).field_type) for name in names]
        return [pa.int64() if _is_whole(kind) else kind for kind in kinds]

    @property
    def key(self) -> str:
        """The key in SQL: one whole number as it is, all else as a digest of the digests of the columns."""
        if self._types == [pa.int64()]:
            return "k0"
        digests = (f"coalesce(md5(CAST(k{place} AS VARCHAR)), 'null')" for place in range(len(self._types)))
        return f"md5_number(concat({', '.join(digests)}))"

    def masks(self) -> list[Mask]:
        return np.split(self.found, np.cumsum([one.file.rows for one in self.rows])[:-1]) if self.rows else []

    def reader(self) -> pa.RecordBatchReader:
        """The rows as (row, k0, k1, ...), read as they are asked for."""
        fields = [("row", pa.int64()), *((f"k{place}", kind) for place, kind in enumerate(self._types))]
        return pa.RecordBatchReader.from_batches(pa.schema(fields), self._batches(pa.schema(fields)))

    def _batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        base = 0
        for one in self.rows:
            if one.chosen.any():
                try:
                    yield from self._of_file(one, base, schema)
                except DlacError as err:
                    self.failure = err
                    raise
                except (OSError, pa.ArrowException) as err:
                    self.failure = DataFileUnreadable(
                        f"expected to read {list(self.keys.read[1])!r} of {one.file.path!r}, found {err}: restore the file"
                    )
                    raise self.failure from err
            base += one.file.rows

    def _of_file(self, one: Rows, base: int, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        for at, columns in key_columns(self.table, one.file, self.keys):
            table = pa.table([pa.array(base + at), *map(_plain, columns)], schema=schema)
            yield from table.filter(pa.array(one.chosen[at])).to_batches()


def _plain(column: Any) -> Any:
    kind = column.type
    if pa.types.is_date32(kind) or pa.types.is_time32(kind):
        column = column.cast(pa.int32())
    return column.cast(pa.int64()) if _is_whole(kind) else column


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_temporal(kind))


@contextmanager
def _failure_of(*sides: _Side) -> Iterator[None]:
    """Raise the error that a side failed with, in place of DuckDB's error about it."""
    import duckdb

    try:
        yield
    except (duckdb.Error, pa.ArrowException) as err:
        for side in sides:
            if side.failure is not None:
                raise side.failure from err
        raise


def _twice(connection: "DuckDBPyConnection", sides: Sequence[_Side], keys: Keys) -> DlacError:
    kind: type[DlacError] = AppendHistoryLost
    expected = "expected row ids to be unique"
    advice = "the table's metadata is broken: declare identity_columns, or start a new run"
    if keys.columns:
        kind, expected = SpecInvalid, f"expected identity columns {list(keys.columns)!r} to tell all rows apart"
        advice = "declare columns that are unique, or remove the double row"
    for side in sides:
        connection.register("side", side.reader())
        query = f'SELECT min("row"), max("row") FROM side GROUP BY {side.key} HAVING count(*) > 1 ORDER BY 1 LIMIT 1'
        with _failure_of(side):
            found = next(iter(connection.execute(query).fetchall()), None)
        connection.unregister("side")
        if found is not None:
            (path, first, where), (other, second, _) = (_place(side, at) for at in found)
            return kind(
                f"{expected}, found {_values(side, found[0])!r} twice in {where}: row {first} of {path!r} and row {second} of "
                f"{other!r}; {advice}"
            )
    return AppendHistoryLost("expected the data files to stay as they are while rows are matched, found otherwise")


def _place(side: _Side, at: int) -> tuple[str, int, str]:
    for one in side.rows:
        if at < one.file.rows:
            return one.file.path, at, one.where
        at -= one.file.rows
    raise IndexError(at)


def _values(side: _Side, at: int) -> dict[str, Any]:
    names = side.keys.read[1]
    for batch in side.reader():
        found = batch.filter(pc.equal(batch.column("row"), at))
        if found.num_rows:
            return {name: found.column(f"k{place}")[0].as_py() for place, name in enumerate(names)}
    return {}
