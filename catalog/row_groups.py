"""The row groups of a pinned snapshot: what is planned, with the rows that a filter leaves.

Each footer is read once, in background threads; filter columns are read only where partition values and file statistics
do not decide the filter for a whole file.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyiceberg.exceptions import ValidationError as IcebergValidationError
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import bind, extract_field_ids
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import expression_to_pyarrow, schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyparsing import ParseBaseException

from catalog.errors import DataFileUnreadable, NoSuchColumn, SpecInvalid, UnsupportedDeletes

_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """One row group of one data file; `dead` holds the sorted offsets of the rows that a filter drops."""

    file_path: str
    row_group: int
    first_row: int
    rows: int
    bytes: int
    dead: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Filter:
    """A row filter by stages: what a file's statistics leave open is decided row by row."""

    schema: Schema
    columns: tuple[str, ...]

    def expression(self, residual: BooleanExpression) -> ds.Expression:
        return expression_to_pyarrow(bind(self.schema, residual, case_sensitive=True), self.schema)


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
    return expression


def row_groups_of(
    table: Table, snapshot_id: int, row_filter: str, *, progress: Callable[[int, int], None] | None = None
) -> list[RowGroup]:
    """All row groups of a snapshot that the filter does not exclude whole, sorted by file path and row group.

    Raises:
        UnsupportedDeletes: a data file has delete files.
        DataFileUnreadable: a data file cannot be read.
    """
    schema = table.schemas()[_schema_id(table, snapshot_id)]
    expression = parse_filter(row_filter, schema)
    tasks = sorted(
        table.scan(row_filter=expression, snapshot_id=snapshot_id).plan_files(), key=lambda task: task.file.file_path
    )
    for task in tasks:
        if task.delete_files:
            raise UnsupportedDeletes(
                f"expected data files without deletes, found {len(task.delete_files)} delete file(s) for "
                f"{task.file.file_path!r}: compact the table, then plan again"
            )
    names = tuple(
        schema.find_column_name(field) or "" for field in sorted(extract_field_ids(bind(schema, expression, True)))
    )
    row_filter_stage = _Filter(schema, names)
    groups: list[RowGroup] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
        for done, found in enumerate(pool.map(lambda task: _of_file(table.io, task, row_filter_stage), tasks), start=1):
            groups.extend(found)
            if progress is not None:
                progress(done, len(tasks))
    return groups


def _schema_id(table: Table, snapshot_id: int) -> int:
    snapshot = table.snapshot_by_id(snapshot_id)
    found = None if snapshot is None else snapshot.schema_id
    return table.metadata.current_schema_id if found is None else found


def _of_file(io: FileIO, task: FileScanTask, row_filter: _Filter) -> list[RowGroup]:
    path = task.file.file_path
    try:
        with io.new_input(path).open() as stream:
            file = pq.ParquetFile(stream)
            return _of_footer(path, file, task.residual, row_filter)
    except (OSError, pa.ArrowInvalid) as err:
        raise DataFileUnreadable(f"expected a Parquet file at {path!r}, found {type(err).__name__}: {err}") from err


def _of_footer(path: str, file: pq.ParquetFile, residual: BooleanExpression, row_filter: _Filter) -> list[RowGroup]:
    groups, first_row = [], 0
    for index in range(file.metadata.num_row_groups):
        footer = file.metadata.row_group(index)
        dead = np.zeros(0, dtype=np.int64)
        if not isinstance(residual, AlwaysTrue):
            dead = _dead_rows(file, index, residual, row_filter)
        groups.append(
            RowGroup(
                file_path=path,
                row_group=index,
                first_row=first_row,
                rows=footer.num_rows,
                bytes=footer.total_byte_size,
                dead=dead,
            )
        )
        first_row += footer.num_rows
    return groups


def _dead_rows(
    file: pq.ParquetFile, index: int, residual: BooleanExpression, row_filter: _Filter
) -> npt.NDArray[np.int64]:
    columns = file_columns(file.schema_arrow, row_filter.schema, row_filter.columns)
    arrow = schema_to_pyarrow(row_filter.schema, include_field_ids=False)
    rows = file.read_row_group(index, columns=[columns[name] for name in row_filter.columns])
    named = pa.table({name: rows[columns[name]].cast(arrow.field(name).type) for name in row_filter.columns})
    position = pa.array(np.arange(named.num_rows, dtype=np.int64))
    live = ds.dataset(named.append_column("dlac_position", position)).to_table(
        columns=["dlac_position"], filter=row_filter.expression(residual)
    )
    return np.setdiff1d(np.arange(named.num_rows, dtype=np.int64), live["dlac_position"].to_numpy(), assume_unique=True)


def file_columns(file_schema: pa.Schema, schema: Schema, names: tuple[str, ...]) -> dict[str, str]:
    """Name in the file of each named top-level column, found by Iceberg field id where the file has ids.

    Raises:
        NoSuchColumn: the file has no such field (it was written before the column was added).
    """
    by_id = {}
    for field in file_schema:
        field_id = (field.metadata or {}).get(b"PARQUET:field_id")
        if field_id is not None:
            by_id[int(field_id)] = field.name
    found = {}
    for name in names:
        wanted = schema.find_field(name)
        in_file = by_id.get(wanted.field_id) if by_id else (name if name in file_schema.names else None)
        if in_file is None:
            raise NoSuchColumn(
                f"expected column {name!r} (field id {wanted.field_id}) in a data file with columns {file_schema.names!r}: "
                "the file is older than the column; choose other columns or rewrite the table"
            )
        found[name] = in_file
    return found
