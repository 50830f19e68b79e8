"""The row groups of a pinned snapshot: what is planned, with the rows that deletes, a filter or exclusions make dead.

Each footer is read once, in background threads. A filter is decided as early as possible: for a file by partition and
metrics, for a row group by its statistics, and only where those leave it open by reading the filter's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.exceptions import ValidationError as IcebergValidationError
from pyiceberg.expressions import AlwaysFalse, AlwaysTrue, BooleanExpression, Or
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import (
    _InclusiveMetricsEvaluator,
    _StrictMetricsEvaluator,
    bind,
    extract_field_ids,
)
from pyiceberg.io.pyarrow import expression_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import DoubleType, FloatType, IcebergType, NestedField
from pyparsing import ParseBaseException

from catalog.columns import Bounds, FileColumns, field_ids, name_mapping_of
from catalog.data_files import ROW_ID_FIELD_ID, LiveFile, as_sql, live_files, snapshot_schema
from catalog.deletes import NO_ROWS, Deletes
from catalog.errors import DataFileUnreadable, NoSuchColumn, SpecInvalid, UnsupportedColumn

_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """One row group of one data file; `dead` holds the sorted offsets of the rows that are not to be read.

    `first_row_id` is the v3 row id of its first row, from which its others count on; None where the file has no such ids,
    or carries them in a column of its own (as a compaction writes them).
    """

    file_path: str
    row_group: int
    first_row: int
    rows: int
    bytes: int
    dead: npt.NDArray[np.int64]
    first_row_id: int | None = None


def parse_filter(text: str, schema: Schema) -> BooleanExpression:
    """The Iceberg expression in `text`; all rows when empty.

    Raises:
        SpecInvalid: it cannot be parsed.
        NoSuchColumn: it names a column that the schema lacks.
    """
    if not text.strip():
        return AlwaysTrue()
    try:
        expression = parse(text)
    except ParseBaseException as err:  # its own message lists the whole grammar
        rest = repr(text[err.loc :]) if text[err.loc :] else "its end"
        raise SpecInvalid(
            f"expected a filter such as \"length > 10 AND lang = 'en'\", found {text!r}, which makes no sense from "
            f"position {err.loc} on: {rest}"
        ) from err
    except ValueError as err:
        raise SpecInvalid(f"expected a filter such as \"length > 10 AND lang = 'en'\", found {text!r}: {err}") from err
    try:
        bind(schema, expression, case_sensitive=True)
    except (ValueError, IcebergValidationError) as err:
        raise NoSuchColumn(f"filter {text!r} does not fit the table's columns {schema.column_names!r}: {err}") from err
    _check_top_level(text, expression, schema)
    return expression


def parse_exclusion(text: str, schema: Schema, table: Table) -> tuple[Schema, BooleanExpression]:
    """The Iceberg expression in `text`, and the columns that it looks at under the names by which it calls them.

    Where `schema` lacks a name, the newest schema of the table that has them all says which columns are meant: what was
    renamed is still found by its field id, and a column that came later is null in older files.

    Raises:
        SpecInvalid: it cannot be parsed.
        NoSuchColumn: no schema of the table has all columns that it names.
    """
    try:
        return schema, parse_filter(text, schema)
    except NoSuchColumn:
        for other in sorted(table.schemas().values(), key=lambda known: known.schema_id, reverse=True):
            with suppress(NoSuchColumn):
                expression = parse_filter(text, other)
                named = [other.find_field(found) for found in sorted(_fields_of(expression, other))]
                now = {found.field_id: found for found in schema.fields}
                columns = [now.get(each.field_id, each).model_copy(update={"name": each.name}) for each in named]
                return Schema(*columns), expression
        raise


def _excluded(exclude: Sequence[str], schema: Schema, table: Table) -> list[_Predicate]:
    """What the exclusions name; those that `schema` understands as one predicate."""
    own: BooleanExpression = AlwaysFalse()
    others = []
    for text in exclude:
        names, expression = parse_exclusion(text, schema, table)
        if names is schema:
            own = Or(own, expression)
        else:
            others.append(_Predicate(names, as_sql(expression)))
    return [_Predicate(schema, as_sql(own)), *others]


def _check_top_level(text: str, expression: BooleanExpression, schema: Schema) -> None:
    nested = _fields_of(expression, schema) - {found.field_id for found in schema.fields}
    if nested:
        names = sorted(schema.find_column_name(field_id) or "" for field_id in nested)
        raise SpecInvalid(
            f"expected a filter on top-level columns, found {text!r}, which looks into {names!r}: filter on other columns"
        )


def _fields_of(expression: BooleanExpression, schema: Schema) -> set[int]:
    found: set[int] = extract_field_ids(bind(schema, expression, case_sensitive=True))
    return found


def row_groups_of(
    table: Table,
    snapshot_id: int,
    row_filter: str,
    *,
    schema: Schema | None = None,
    progress: Callable[[int, int], None] | None = None,
    only: Callable[[LiveFile], bool] | None = None,
    exclude: Sequence[str] = (),
) -> list[RowGroup]:
    """All row groups of a snapshot but for the files that the filter excludes whole, sorted by file path and row group.

    A row is dead if a delete names it, if the filter is not true for it, or if one of `exclude` is. Exclusions leave the
    list of row groups as it is, and may name columns as another schema of the table does (see `parse_exclusion`). `only`
    chooses among the files; `schema` names the columns: the snapshot's own unless given.

    Raises:
        NoSuchSnapshot, SpecInvalid, NoSuchColumn: the request does not fit the table.
        DataFileUnreadable: a data file, delete file or manifest cannot be read.
        UnsupportedDeletes, UnsupportedColumn: a file holds what cannot be read exactly.
    """
    schema = schema or snapshot_schema(table, snapshot_id)
    wanted = parse_filter(row_filter, schema)
    files = [file for file in live_files(table, snapshot_id, wanted, schema=schema) if only is None or only(file)]
    planner = _Planner(table, schema, _excluded(exclude, schema, table))
    groups: list[RowGroup] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
        for done, found in enumerate(pool.map(planner.row_groups, files), start=1):
            groups.extend(found)
            if progress is not None:
                progress(done, len(files))
    return groups


@dataclass(frozen=True)
class _Predicate:
    """An expression, as SQL understands it, decided by statistics or row by row."""

    schema: Schema
    expression: BooleanExpression

    @cached_property
    def names(self) -> list[str]:
        """The columns that it looks at."""
        return [self.schema.find_field(found).name for found in sorted(_fields_of(self.expression, self.schema))]

    @cached_property
    def _may(self) -> _InclusiveMetricsEvaluator:
        return _InclusiveMetricsEvaluator(self.schema, self.expression)

    @cached_property
    def _must(self) -> _StrictMetricsEvaluator:
        return _StrictMetricsEvaluator(self.schema, self.expression)

    @cached_property
    def _rows(self) -> ds.Expression:
        return expression_to_pyarrow(bind(self.schema, self.expression, case_sensitive=True), self.schema)

    def of_all(self, rows: int, bounds: dict[str, Bounds]) -> bool | None:
        """Whether it is true for all rows (True) or none (False) of a row group with these statistics; None: not known."""
        if isinstance(self.expression, AlwaysTrue | AlwaysFalse):
            return isinstance(self.expression, AlwaysTrue)
        metrics = _metrics(rows, {self.schema.find_field(name): bounds.get(name) for name in self.names})
        if not self._may.eval(metrics):
            return False
        return True if self._must.eval(metrics) else None

    def of_rows(self, table: pa.Table) -> npt.NDArray[np.bool_]:
        """For which rows it is true; `table` has the columns `names`."""
        position = pa.array(np.arange(len(table), dtype=np.int64))
        found = ds.dataset(table.append_column("dlac_position", position)).to_table(
            columns=["dlac_position"], filter=self._rows
        )
        true = np.zeros(len(table), dtype=np.bool_)
        true[found["dlac_position"].to_numpy()] = True
        return true


def _metrics(rows: int, bounds: dict[NestedField, Bounds | None]) -> DataFile:
    """Statistics of a row group in the form that pyiceberg's evaluators take.

    They take an unknown number of nulls or NaN for none: `rows + 1` says that there may be some, and not only those.
    """
    known = {found.field_id: (found.field_type, bound) for found, bound in bounds.items() if bound is not None}
    return DataFile.from_args(
        record_count=rows,
        value_counts=dict.fromkeys((found.field_id for found in bounds), rows),
        null_value_counts={
            found.field_id: rows + 1 if bound is None or bound.nulls is None else bound.nulls
            for found, bound in bounds.items()
        },
        nan_value_counts={
            found.field_id: rows + 1 for found in bounds if isinstance(found.field_type, FloatType | DoubleType)
        },
        lower_bounds={
            key: _as_bytes(kind, bound.lower) for key, (kind, bound) in known.items() if bound.lower is not None
        },
        upper_bounds={
            key: _as_bytes(kind, bound.upper) for key, (kind, bound) in known.items() if bound.upper is not None
        },
    )


def _as_bytes(kind: IcebergType, value: Any) -> bytes:
    temporal = isinstance(value, pa.TimestampScalar | pa.Date32Scalar | pa.Time64Scalar)
    found: bytes = to_bytes(kind, value.value if temporal else value.as_py())  # type: ignore[arg-type]  # only primitives have bounds
    return found


class _Planner:
    """Row groups of data files, one file at a time, in any thread."""

    def __init__(self, table: Table, schema: Schema, excluded: Sequence[_Predicate]) -> None:
        self._io = table.io
        self._schema = schema
        self._mapping = name_mapping_of(table)
        self._deletes = Deletes(table, schema)
        self._excluded = excluded
        self._predicates: dict[int, _Predicate] = {}

    def row_groups(self, file: LiveFile) -> list[RowGroup]:
        """The row groups of a file, from one opening of it."""
        try:
            with self._io.new_input(file.path).open() as stream:
                return self._of_parquet(file, pq.ParquetFile(stream))
        except (OSError, pa.ArrowException) as err:
            raise DataFileUnreadable(
                f"expected a Parquet file at {file.path!r}, found {type(err).__name__}: {err}; restore the file, or plan "
                "another snapshot"
            ) from err
        except (NoSuchColumn, UnsupportedColumn) as err:
            raise type(err)(f"{err} (data file {file.path!r})") from err

    def _of_parquet(self, file: LiveFile, parquet: pq.ParquetFile) -> list[RowGroup]:
        deleted = self._deletes.dead_rows(file, parquet)
        wanted = self._in_file(file, parquet, self._wanted(file.residual))
        excluded = [self._in_file(file, parquet, each) for each in self._excluded]
        first_row_id = None if ROW_ID_FIELD_ID in field_ids(parquet.schema_arrow) else file.first_row_id
        groups, first_row = [], 0
        for index in range(parquet.num_row_groups):
            footer = parquet.metadata.row_group(index)
            start, end = np.searchsorted(deleted, (first_row, first_row + footer.num_rows))
            groups.append(
                RowGroup(
                    file_path=file.path,
                    row_group=index,
                    first_row=first_row,
                    rows=footer.num_rows,
                    bytes=footer.total_byte_size,
                    dead=_dead_rows(index, deleted[start:end] - first_row, footer.num_rows, wanted, excluded),
                    first_row_id=None if first_row_id is None else first_row_id + first_row,
                )
            )
            first_row += footer.num_rows
        return groups

    def _wanted(self, residual: BooleanExpression) -> _Predicate:
        """One predicate for all files that share a residual, since preparing it costs more than asking it."""
        return self._predicates.setdefault(id(residual), _Predicate(self._schema, residual))

    def _in_file(self, file: LiveFile, parquet: pq.ParquetFile, predicate: _Predicate) -> _InFile:
        columns = FileColumns.of(
            parquet.schema_arrow,
            predicate.schema,
            predicate.names,
            name_mapping=self._mapping,
            partition_values=file.partition_values,
        )
        return _InFile(predicate, parquet, columns)


@dataclass(frozen=True, slots=True)
class _InFile:
    """A predicate over one file."""

    predicate: _Predicate
    parquet: pq.ParquetFile
    columns: FileColumns

    def is_true(self, row_group: int) -> bool | npt.NDArray[np.bool_]:
        """For which rows of a row group the predicate is true; reads them only if the statistics do not say it."""
        footer = self.parquet.metadata.row_group(row_group)
        known = self.predicate.of_all(footer.num_rows, self.columns.bounds(footer))
        if known is not None:
            return known
        read = self.parquet.read_row_group(row_group, columns=self.columns.in_file)
        return self.predicate.of_rows(self.columns.align(read, footer.num_rows))


def _dead_rows(
    index: int, deleted: npt.NDArray[np.int64], rows: int, wanted: _InFile, excluded: Sequence[_InFile]
) -> npt.NDArray[np.int64]:
    """Sorted offsets of the dead rows of a row group."""
    dead = np.zeros(rows, dtype=np.bool_)
    dead[deleted] = True
    if not dead.all():
        dead |= np.logical_not(wanted.is_true(index))
    for each in excluded:
        if not dead.all():
            dead |= each.is_true(index)
    return np.flatnonzero(dead) if dead.any() else NO_ROWS
