"""Rows of DLAC's own tables as Arrow, or as a query for DuckDB.

pyiceberg reads each manifest again for each scan, and converts the schema and the filter again for each data file, in Python.
Own tables have many small files, their columns keep their names, and rows are removed with their files. So a manifest is read
once, and so is a file if few of its rows are wanted. For many rows in local files DuckDB reads only the needed ones, PyArrow all.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from cachetools import LRUCache
from pyiceberg import expressions
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo, In, IsNull
from pyiceberg.expressions.visitors import bind
from pyiceberg.io.pyarrow import PyArrowFileIO, expression_to_pyarrow, schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestFile
from pyiceberg.partitioning import PartitionFieldValue, PartitionKey
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.utils.concurrent import ExecutorFactory

from dlac_pipeline.lakehouse.errors import TableDamaged
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.retrying import is_final, may_pass

LARGE_ROWS = 250_000
"""Rows in data files from which on a table is not loaded."""
_GLOBBING = re.compile(r"[*?\[\]]")  # for these DuckDB looks for other files than the named one
_RELATIONS = {EqualTo: "=", expressions.GreaterThan: ">", expressions.LessThanOrEqual: "<="}
_SMALL_BYTES = 64 << 10
_COLUMN_BYTES = 1 << 10
"""Estimated memory of a column of a small table in addition to its values: Arrow's objects, and buffers of 64 bytes."""
PARQUET = ds.ParquetFileFormat()
_WRITING: Any = {"compression": "zstd", "use_dictionary": False, "store_schema": False}
"""Options of a small file."""
_Key = tuple[str, int, str, tuple[str, ...]]
"""Path of a data file, schema, filter and columns."""


def bytes_of_rows(rows: pa.Table) -> int:
    """Return the estimated memory of a small table."""
    return int(rows.nbytes + _COLUMN_BYTES * rows.num_columns)


KEPT_FILES: LRUCache[str, list[DataFile]] = LRUCache(4096)
"""The data files of manifests, which never change, by path."""
KEPT_ROWS: LRUCache[_Key, pa.Table] = LRUCache(64 << 20, bytes_of_rows)
"""Few rows of data files, which never change. The bound is in bytes: a long run has thousands of small files, all of which its
supervisor reads at each recovery. A bound in files below their number would drop each file before its next read."""
_KEEPING = threading.Lock()
"""Lock of both caches."""


def read_rows(table: Table, row_filter: BooleanExpression, *, columns: Sequence[str] = ("*",)) -> pa.Table:
    """Return the rows of an own table that a filter selects, in the order of its data files.

    Only files of one run are opened if the filter is a condition on `run`, or an `And` that begins with one. Raises
    `FileNotFoundError` if upkeep has removed a file of this snapshot, or `TableDamaged`.
    """
    columns = tuple(columns)
    scan = table.scan(row_filter, selected_fields=columns)
    files = data_files(table, row_filter)
    if files is None:
        return scan.to_arrow()
    is_large = sum(each.record_count for each in files) > LARGE_ROWS
    rows = rows_in_files(table, files, row_filter, ("/",)) if is_large else None
    if rows is not None:
        return _read_by_duckdb(table, rows, schema_to_pyarrow(scan.projection(), include_field_ids=False))
    schema: Any = schema_to_pyarrow(table.schema(), include_field_ids=False)
    wanted: dict[str, Any] = {"columns": [field.name for field in scan.projection().fields]}
    if row_filter != AlwaysTrue():
        bound = bind(table.schema(), row_filter, case_sensitive=True)
        wanted["filter"] = expression_to_pyarrow(bound, table.schema())

    described = (table.schema().schema_id, repr(row_filter), columns)

    def read(file: DataFile) -> pa.Table:
        rows = read_file(table, file, schema, **wanted)
        if rows.nbytes <= _SMALL_BYTES:
            with _KEEPING:
                KEPT_ROWS[file.file_path, *described] = rows
        return rows

    with _KEEPING:
        known = [KEPT_ROWS.get((file.file_path, *described)) for file in files]
    unread = [file for file, rows in zip(files, known, strict=True) if rows is None]
    found = iter(map(read, unread) if len(unread) < 2 else ExecutorFactory.get_or_create().map(read, unread))
    parts = [next(found) if rows is None else rows for rows in known]
    return pa.concat_tables([schema.empty_table().select(wanted["columns"]), *parts])


def write_small(table: Table, rows: pa.Table) -> DataFile:
    """Write a few rows of one partition of an own table. Return their data file, which no snapshot names yet.

    The file lacks the columns without values, which Iceberg reads as nulls, and the copy of the schema that Arrow adds. pyiceberg
    writes all columns, in four times the bytes.
    """
    spec, schema = table.spec(), table.schema()
    known = {*rows.column_names}  # a later version may have added others to the table
    kept = Schema(*(each for each in schema.fields if each.name in known and rows[each.name].null_count < len(rows)))
    part = PartitionFieldValue(spec.fields[0], rows[spec.fields[0].name][0].as_py())
    key = PartitionKey([part], spec, schema)
    output = table.io.new_output(table.location_provider().new_data_location(f"{uuid4()}.parquet", key))
    arrow: Any = schema_to_pyarrow(kept)
    with output.create() as stream:
        pq.write_table(rows.select(arrow.names).cast(arrow), stream, **_WRITING)
    return DataFile.from_args(
        content=DataFileContent.DATA,
        file_path=output.location,
        file_format=FileFormat.PARQUET,
        partition=key.partition,
        record_count=len(rows),
        file_size_in_bytes=len(output),
        spec_id=spec.spec_id,
    )


def data_files(table: Table, row_filter: BooleanExpression, snapshot_id: int | None = None) -> list[DataFile] | None:
    """Return the data files of a snapshot that may have wanted rows, or None if it has delete files. Unset: the current one."""
    manifests = _manifests(table, snapshot_id)
    if any(each.content != ManifestContent.DATA for each in manifests):
        return None

    def read(manifest: ManifestFile) -> list[DataFile]:
        return _files_in(table, manifest)

    with _KEEPING:
        known = {path: KEPT_FILES[path] for each in manifests if (path := each.manifest_path) in KEPT_FILES}
    unread = [each for each in manifests if each.manifest_path not in known]
    found = map(read, unread) if len(unread) < 2 else ExecutorFactory.get_or_create().map(read, unread)
    new = {each.manifest_path: files for each, files in zip(unread, found, strict=True)}
    with _KEEPING:
        KEPT_FILES.update(new)
    known |= new
    run = _run_in(row_filter)
    files = own_files(table, [file for each in manifests for file in known[each.manifest_path]])
    return [each for each in files if run is None or len(each.partition) == 0 or each.partition[0] == run]


def _manifests(table: Table, snapshot_id: int | None = None) -> list[ManifestFile]:
    snapshot = table.current_snapshot() if snapshot_id is None else table.snapshot_by_id(snapshot_id)
    if snapshot is None:
        return []
    with decoding(table, snapshot.manifest_list):
        return snapshot.manifests(table.io)


def _files_in(table: Table, manifest: ManifestFile) -> list[DataFile]:
    with decoding(table, manifest.manifest_path):
        return own_files(table, [entry.data_file for entry in manifest.fetch_manifest_entry(table.io)])


def own_files(table: Table, files: list[DataFile]) -> list[DataFile]:
    """Return data files of an own table. Raises `TableDamaged` if a manifest is another table's."""
    folders = (table.location(), table.location_provider().data_path)
    if stranger := next((each for each in files if not each.file_path.startswith(folders)), None):
        raise _damaged(
            table, f"{table.location()}/metadata", f"a manifest with {stranger.file_path!r}, of another table"
        )
    return files


def manifest_files(table: Table) -> list[Callable[[], list[DataFile]]]:
    """Return, for each manifest of a table's current snapshot, a function that reads its data files. Raises as `read_rows`."""
    return [partial(_files_in, table, each) for each in _manifests(table)]


def read_file(table: Table, file: DataFile, schema: Any = None, **options: Any) -> pa.Table:
    """Return the rows of one data file of an own table, in the table's schema or another. Raises as `read_rows`."""
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False) if schema is None else schema
    with decoding(table, file.file_path), table.io.new_input(file.file_path).open() as stream:
        _check_size(table, file, stream.seek(0, os.SEEK_END))
        return PARQUET.make_fragment(stream).to_table(schema, **options)


@contextmanager
def decoding(table: Table, path: str) -> Iterator[None]:
    """Turn the errors of a file of an own table with other content into `TableDamaged`. Outages pass as they are."""
    try:
        yield
    except (TableDamaged, MemoryError):
        raise
    except OSError as err:  # pyarrow's of damaged pages has no number
        if isinstance(err, FileNotFoundError) or may_pass(err) or is_final(err):
            raise
        raise _damaged(table, path, f"{type(err).__name__}: {err}") from err
    except Exception as err:  # the Avro decoder raises whatever the content leads to
        raise _damaged(table, path, f"{type(err).__name__}: {err}") from err


def _check_size(table: Table, file: DataFile, found: int) -> None:
    if found != file.file_size_in_bytes:
        raise _damaged(table, file.file_path, f"{found} bytes instead of {file.file_size_in_bytes}")


def _damaged(table: Table, path: str, found: str) -> TableDamaged:
    return TableDamaged(
        f"expected a file of table {table.name()[-1]!r} as it was written in {path!r}, found {found.splitlines()[0]:.200}: "
        "restore it from a backup, or stop all launches and run `dlac ledger rebuild`"
    )


def _run_in(row_filter: BooleanExpression) -> str | None:
    """Return the run that the first condition of a filter names, or None."""
    while isinstance(row_filter, And):
        row_filter = row_filter.left
    if isinstance(row_filter, EqualTo) and getattr(row_filter.term, "name", "") == "run":
        return str(row_filter.literal.value)
    return None


def error_of_duckdb(table: Table, err: Exception) -> Exception:
    """Return the error for DuckDB's failure to read the files of an own table."""
    import duckdb

    if isinstance(err, duckdb.IOException):  # upkeep has removed a file since
        return FileNotFoundError(str(err))
    return err if isinstance(err, duckdb.OutOfMemoryException) else _damaged(table, table.location(), str(err))


def _read_by_duckdb(table: Table, rows: str, schema: Any) -> pa.Table:
    import duckdb  # it takes 0.2 s, and few processes read a large table

    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        try:
            found: Any = connection.sql(f"SELECT {', '.join(schema.names)} FROM ({rows})").to_arrow_table()
        except duckdb.Error as err:
            raise error_of_duckdb(table, err) from err
    return found.cast(schema)


def rows_in_files(
    table: Table, files: Sequence[DataFile], wanted: BooleanExpression, folders: tuple[str, ...]
) -> str | None:
    """Return a query for rows of an own table, or None for files outside of `folders`. Raises as `read_rows`."""
    io, name, paths = table.io, table.name()[-1], []
    for each in files:
        places = io.parse_location(each.file_path, io.properties) if isinstance(io, PyArrowFileIO) else ("", "", "")
        if places[0] != "file" or not places[2].startswith(folders) or _GLOBBING.search(places[2]):
            return None
        paths.append(places[2])
    for file, path in zip(files, paths, strict=True):
        _check_size(table, file, os.stat(path).st_size)  # this raises for a missing file
    found = f"read_parquet([{sql_literals(paths)}], union_by_name = true, hive_partitioning = false)"
    return f"{no_rows(name)} UNION ALL BY NAME FROM {found} WHERE {_condition(wanted)}" if paths else no_rows(name)


@cache
def no_rows(name: str) -> str:
    """Return a query with the columns of one of DLAC's tables, and no row."""
    import duckdb

    schema: Any = schema_to_pyarrow(TABLES[name][0], include_field_ids=False)
    with duckdb.connect() as connection:
        empty = connection.from_arrow(schema.empty_table())
        columns = [f"NULL::{kind} AS {column}" for column, kind in zip(empty.columns, empty.types, strict=True)]
    return f"SELECT {', '.join(columns)} WHERE false"


def local_paths(address: str) -> list[str]:
    """Return the local path of an address as it is written and as it is resolved. Empty for an address elsewhere."""
    scheme, colon, rest = address.partition(":")
    if colon and scheme != "file":
        return []
    path = "/" + (rest if colon else address).lstrip("/")
    return sorted({path, str(Path(path).resolve())})


def sql_literals(values: Iterable[str | int]) -> str:
    """Return values as literals of SQL, with commas between them."""
    return ", ".join(str(each) if isinstance(each, int) else "'" + each.replace("'", "''") + "'" for each in values)


def _condition(wanted: BooleanExpression) -> str:
    """Return one of the expressions with which own tables are read as SQL."""
    if isinstance(wanted, And):
        return f"{_condition(wanted.left)} AND {_condition(wanted.right)}"
    found: Any = wanted  # the hidden signatures of pyiceberg's pydantic bases
    if isinstance(wanted, In):
        name, listed = found.term.name, sql_literals(sorted(each.value for each in found.literals))
        # most rows are advances: by this DuckDB skips their other columns, and not by a list
        most = "kind <> 'advance' AND " if name == "kind" and "'advance'" not in listed else ""
        return f"{most}{name} IN ({listed})"
    if isinstance(wanted, IsNull):
        return f"{found.term.name} IS NULL"
    if type(wanted) in _RELATIONS:
        return f"{found.term.name} {_RELATIONS[type(wanted)]} {sql_literals([found.literal.value])}"
    return {AlwaysTrue: "true", expressions.AlwaysFalse: "false"}[type(wanted)]
