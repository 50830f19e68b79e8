"""Parquet files at a location: their names by a pattern, their Hive partitions, and the columns that all of them have."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

import pyarrow.parquet as pq
from fsspec.utils import glob_translate  # type: ignore[import-untyped]  # published without types
from pyarrow.fs import FileSelector, FileSystem, FileType
from pyiceberg.exceptions import ResolveError
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.schema import Schema, assign_fresh_schema_ids, promote
from pyiceberg.types import LongType, NestedField, PrimitiveType, StringType

from dlac_pipeline.extensions.registration.column_types import FoundColumns, find_columns
from dlac_pipeline.lakehouse.errors import DataFileUnreadable, SpecInvalid, UnsupportedColumn
from dlac_pipeline.lakehouse.iceberg.columns import expect

WILD = re.compile(r"[*?\[]")
INTEGER = re.compile(r"-?[0-9]{1,18}")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_LOGS = {"_delta_log": "delta", ".hoodie": "hudi"}
"""Folder of the log of a table -> its format."""
_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFile:
    """A file at a location, not opened yet."""

    address: str
    """The value as Iceberg records it."""
    bytes: int
    changed_at: datetime | None
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """Hive partition key -> value, in the order of the folders."""


class Location:
    """A folder, a bucket, a file or a pattern such as `s3://bucket/pages/**/*.parquet`."""

    def __init__(self, location: str, properties: Mapping[str, str]) -> None:
        """`properties` are PyIceberg's, of the lakehouse. Raises `SpecInvalid` if no file system serves the location."""
        self.pattern = location if "://" in location else f"file://{Path(location).absolute()}"
        scheme, _, self._path = self.pattern.partition("://")  # keys and patterns may have what an URL reserves
        self._prefix = f"{scheme}://"
        self._is_local = scheme == "file"
        self._io = PyArrowFileIO(dict(properties))
        netloc = "" if self._is_local else self._path.partition("/")[0]
        try:
            self._files: FileSystem = self._io.fs_by_scheme(scheme, netloc)
        except ValueError as err:
            raise SpecInvalid(
                f"expected a folder, or an address such as s3://bucket/path, found {location!r}: {err}"
            ) from err

    def find(self) -> list[ParquetFile]:
        """Return the files, sorted by address. Names with a leading `_` or `.` are left out, as Spark does.

        Raises:
            SpecInvalid: there is none, or an object has a key that cannot be read.
            DataFileUnreadable: the location cannot be listed.
        """
        root, wild = self._root()
        info = self._info(root)
        found = [info] if info.type == FileType.File else self._info(FileSelector(root, recursive=True))
        matches = re.compile(glob_translate(self._path) if wild else r".*\.parquet").fullmatch
        paths = [info for info in found if info.type == FileType.File and (info.path == root or matches(info.path))]
        files = [
            ParquetFile(
                address=self._prefix + info.path, bytes=info.size, changed_at=info.mtime, keys=_keys(info.path, root)
            )
            for info in paths
            if not any(part[0] in "_." for part in info.path[len(root) + 1 :].split("/") if part)
        ]
        files.sort(key=lambda file: file.address)
        if not files:
            raise SpecInvalid(
                f"expected Parquet files at {self.pattern!r}, found none: correct the location or its pattern"
            )
        reserved = [file.address for file in files if not self._is_local and set(file.address) & set("?#")]
        if reserved:
            raise SpecInvalid(
                f"expected keys without '?' and '#', which PyIceberg cuts off, found {reserved[0]!r}: rename the object"
            )
        return files

    def check_plain(self) -> None:
        """Raise `SpecInvalid` if a folder belongs to a table: its files may have rows that the table deleted."""
        root, _ = self._root()
        self._check_no_log(root)
        for above in PurePosixPath(root).parents if self._is_local else PurePosixPath(root).parents[:-1]:
            with suppress(DataFileUnreadable):  # a user may be allowed to list the location only
                self._check_no_log(str(above))

    def _check_no_log(self, folder: str) -> None:
        place = folder if self._is_local else self._prefix + folder
        problem = f"expected plain Parquet files, found {{}} at {place!r}, whose deleted rows may be in them: "
        for name, table_format in _LOGS.items():
            if self._info(f"{folder}/{name}").type == FileType.Directory:
                raise SpecInvalid(
                    f'{problem.format(f"a {table_format} table")}write a job file with source.format = "{table_format}" and '
                    f'source.table = "{place}"'
                )
        for info in self._info(FileSelector(f"{folder}/metadata", allow_not_found=True)):
            if info.path.endswith(".metadata.json"):
                raise SpecInvalid(f"{problem.format('an Iceberg table')}name it as namespace.table, in its catalog")

    def _info(self, place: str | FileSelector) -> Any:
        """Return the file or folder at a path, or the list of files that a selector selects."""
        with expect(f"to list {self.pattern!r}", "correct the location, or reach it"):
            return self._files.get_file_info(place)

    def _root(self) -> tuple[str, bool]:
        """Return the folder or file of the location, and True if a pattern follows it."""
        wild = WILD.search(self._path) if self._info(self._path).type == FileType.NotFound else None
        return (self._path[: self._path.rfind("/", 0, wild.start())], True) if wild else (self._path.rstrip("/"), False)

    def columns(self, files: Sequence[ParquetFile]) -> list[FoundColumns]:
        """Return the columns of each file. Raises `DataFileUnreadable` for one that is no Parquet file or of other bytes."""

        def read(file: ParquetFile) -> FoundColumns:
            path = file.address.removeprefix(self._prefix)
            with (
                expect(f"a Parquet file at {file.address!r}", "leave it out of the location, or restore it"),
                pq.ParquetFile(path, filesystem=self._files, coerce_int96_timestamp_unit="us") as parquet,
                pq.ParquetFile(path, filesystem=self._files, metadata=parquet.metadata) as exact,
            ):
                _check_no_table(file, parquet.metadata.metadata or {})
                return find_columns(parquet, exact)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
            return list(pool.map(read, files))


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitedColumns:
    """The columns of all files, without ids, and the columns that are left out, each with the reason."""

    columns: list[NestedField]
    left_out: dict[str, str]
    with_ids: bool
    """True if a file has field ids."""


def unite_columns(
    files: Sequence[ParquetFile],
    found: Sequence[FoundColumns],
    known: Mapping[str, NestedField],
    left_out: Mapping[str, str],
) -> UnitedColumns:
    """Return the wider type of each column, then the partition keys.

    `known` are the columns of the table, without ids, and `left_out` are columns that it has left out before.

    Raises:
        SpecInvalid: two files have a column in two types and neither type is wider, or a key is also a column.
        UnsupportedColumn: no column is left, a file has a column of the table in a type that Iceberg has not, or names of
            columns contradict each other.
    """
    left_out = dict(left_out)
    for file, one in zip(files, found, strict=True):
        for name, reason in one.unfit.items():
            left_out.setdefault(name, f"{reason}, in {file.address!r}")
            if name in known:
                raise UnsupportedColumn(
                    f"expected column {name!r} of the table in {file.address!r} as {known[name].field_type}, found that "
                    f"{reason}: write the file again with another type, or register it as another table"
                )
    keys = _key_columns(files, known)
    columns = {name: (column, "the table") for name, column in known.items() if name not in keys}
    for file, one in zip(files, found, strict=True):
        for column in one.fit:
            _check_no_key(column.name, keys, file)
            before, where = columns.setdefault(column.name, (column, repr(file.address)))
            if column.field_type != before.field_type:
                wider = _wider(column, before, (repr(file.address), where))
                columns[column.name] = (before.model_copy(update={"field_type": wider}), where)
    united = [column for column, _ in columns.values() if column.name not in left_out]
    _check_columns([*united, *keys.values()], left_out, files)
    with_ids = any(one.with_ids for one in found)
    return UnitedColumns(columns=[*united, *keys.values()], left_out=left_out, with_ids=with_ids)


def _check_no_table(file: ParquetFile, properties: Mapping[bytes, bytes]) -> None:
    if b"iceberg.schema" in properties:
        raise UnsupportedColumn(
            f"expected a plain Parquet file at {file.address!r}, found a data file of an Iceberg table, whose deleted rows "
            "may be in it: train from the Iceberg table to which it belongs"
        )


def _check_no_key(name: str, keys: Mapping[str, NestedField], file: ParquetFile) -> None:
    if name in keys:
        raise SpecInvalid(
            f"expected partition key {name!r} in the names of folders only, found a column of this name in "
            f"{file.address!r}: rename the folders, or name the files by a pattern below them"
        )


def _check_columns(columns: Sequence[NestedField], left_out: Mapping[str, str], files: Sequence[ParquetFile]) -> None:
    """Raise `UnsupportedColumn` if these are no columns of a table."""
    if not columns:
        reasons = "; ".join(f"{name!r}: {reason}" for name, reason in left_out.items()) or "no value in any column"
        raise UnsupportedColumn(
            f"expected columns of types that Iceberg has in {files[0].address!r} and the files beside it, found {reasons}: write "
            "them again with other types"
        )
    try:
        assign_fresh_schema_ids(Schema(*columns))
    except ValueError as err:
        raise UnsupportedColumn(
            f"expected columns whose names are not also paths into other columns, found {err} in {files[0].address!r} or a "
            "file beside it: rename one of them"
        ) from err


def _wider(one: NestedField, other: NestedField, places: tuple[str, str]) -> PrimitiveType:
    for narrow, wide in ((one, other), (other, one)):
        try:
            promote(narrow.field_type, wide.field_type)
        except ResolveError:
            continue
        return wide.field_type  # type: ignore[return-value]  # only primitive types are promoted
    raise SpecInvalid(
        f"expected one type of column {one.name!r} in all files, found {one.field_type} in {places[0]} and {other.field_type} "
        f"in {places[1]}: register them as two tables, or write one of them again"
    )


def _keys(path: str, root: str) -> dict[str, str | None]:
    folders = path[len(root) + 1 :].split("/")[:-1]
    parts = (folder.partition("=") for folder in folders if "=" in folder)
    return {unquote(key): None if value == _NULL else unquote(value) for key, _, value in parts}


def check_keys(files: Sequence[ParquetFile], keys: Sequence[str] | None) -> None:
    """Raise `SpecInvalid` unless all files have the partition keys `keys`, or the keys of the first file, in any order."""
    expected, origin = (list(files[0].keys), repr(files[0].address)) if keys is None else (list(keys), "the table")
    for file in files:
        if sorted(file.keys) != sorted(expected):
            raise SpecInvalid(
                f"expected the same partition keys in the folders of all files, found {expected!r} for {origin} "
                f"and {list(file.keys)!r} for {file.address!r}: name one kind of them by a pattern"
            )


def _key_columns(files: Sequence[ParquetFile], known: Mapping[str, NestedField]) -> dict[str, NestedField]:
    """Return the partition keys as columns: as the table has them, else long if all values are integers, else string."""
    columns = {}
    for key in files[0].keys:
        values = {file.keys[key] for file in files}
        whole = all(value is None or INTEGER.fullmatch(value) for value in values)
        made = NestedField(-1, key, LongType() if whole else StringType(), required=False)
        columns[key] = known.get(key, made)
    return columns
