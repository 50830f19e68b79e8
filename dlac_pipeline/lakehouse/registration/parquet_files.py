"""Parquet files at a location: their names by a pattern, their Hive partitions, and the columns that all of them have."""

import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.utils import glob_translate  # type: ignore[import-untyped]  # published without types
from pyarrow.fs import FileSelector, FileSystem, FileType
from pyiceberg.exceptions import ResolveError
from pyiceberg.io.pyarrow import PyArrowFileIO, UnsupportedPyArrowTypeException, _pyarrow_to_schema_without_ids
from pyiceberg.schema import promote
from pyiceberg.types import LongType, NestedField, PrimitiveType, StringType

from dlac_pipeline.lakehouse.errors import SpecInvalid, UnsupportedColumn
from dlac_pipeline.lakehouse.iceberg.columns import FIELD_ID, expect

WILD = re.compile(r"[*?\[]")
_INTEGER = re.compile(r"-?\d{1,18}")
_NULL = "__HIVE_DEFAULT_PARTITION__"
_LOGS = {"_delta_log": "delta", ".hoodie": "hudi"}
"""Folder of the log of a table -> its format."""
_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class ParquetFile:
    """A file at a location, not opened yet."""

    address: str
    """As Iceberg records it."""
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
            SpecInvalid: there is none, or their folders have different partition keys.
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
        _check_keys(files)
        return files

    def check_plain(self) -> None:
        """Raise `SpecInvalid` if the folder is that of a table, whose deleted rows may be in its files."""
        root, _ = self._root()
        place = root if self._is_local else self._prefix + root
        problem = f"expected plain Parquet files, found {{}} at {place!r}, whose deleted rows may be in them: "
        for name, table_format in _LOGS.items():
            if self._info(f"{root}/{name}").type == FileType.Directory:
                raise SpecInvalid(
                    f'{problem.format(f"a {table_format} table")}write a job file with source.format = "{table_format}" and '
                    f'source.table = "{place}"'
                )
        for info in self._info(FileSelector(f"{root}/metadata", allow_not_found=True)):
            if info.path.endswith(".metadata.json"):
                raise SpecInvalid(f"{problem.format('an Iceberg table')}name it as namespace.table, in its catalog")

    def _info(self, place: str | FileSelector) -> Any:
        """Return the file or folder at a path, or the list of those that a selector selects."""
        with expect(f"to list {self.pattern!r}", "correct the location, or reach it"):
            return self._files.get_file_info(place)

    def _root(self) -> tuple[str, bool]:
        """Return the folder or file of the location, and True if a pattern follows it."""
        wild = WILD.search(self._path) if self._info(self._path).type == FileType.NotFound else None
        return (self._path[: self._path.rfind("/", 0, wild.start())], True) if wild else (self._path.rstrip("/"), False)

    def schemas(self, files: Sequence[ParquetFile]) -> list[pa.Schema]:
        """Return the schema of each file, from its footer. Raises `DataFileUnreadable` for one that is no Parquet file."""

        def read(file: ParquetFile) -> pa.Schema:
            with expect(f"a Parquet file at {file.address!r}", "leave it out of the location, or restore it"):
                return pq.read_schema(file.address.removeprefix(self._prefix), filesystem=self._files)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
            return list(pool.map(read, files))


def unite_columns(files: Sequence[ParquetFile], schemas: Sequence[pa.Schema]) -> list[NestedField]:
    """Return the columns of all files, as Iceberg has them, without ids: the wider type of each, then the partition keys.

    Raises:
        SpecInvalid: two files have types of a column of which neither is wider, or a key is also a column.
        UnsupportedColumn: Iceberg has no such type, or the files have field ids, which are another table's.
    """
    columns: dict[str, tuple[NestedField, str]] = {}
    for file, schema in zip(files, schemas, strict=True):
        for column in _columns(file, schema):
            known, where = columns.setdefault(column.name, (column, file.address))
            if column.field_type != known.field_type:
                wider = _wider(column, known, (file.address, where))
                columns[column.name] = (known.model_copy(update={"field_type": wider}), where)
    for key in files[0].keys:
        if key in columns:
            raise SpecInvalid(
                f"expected partition key {key!r} in the names of folders only, found a column of this name in "
                f"{columns[key][1]!r}: rename the folders, or name the files by a pattern below them"
            )
    return [*(column for column, _ in columns.values()), *_key_columns(files)]


def _columns(file: ParquetFile, schema: pa.Schema) -> list[NestedField]:
    if any(FIELD_ID in (column.metadata or {}) for column in schema):
        raise UnsupportedColumn(
            f"expected {file.address!r} without field ids, found some: train from the Iceberg table to which it belongs"
        )
    try:
        found = _pyarrow_to_schema_without_ids(schema.remove_metadata()).fields
    except (TypeError, ValueError, UnsupportedPyArrowTypeException) as err:
        raise UnsupportedColumn(
            f"expected columns of types that Iceberg has, found {err} in {file.address!r}: write the file again with another type"
        ) from err
    return [column.model_copy(update={"required": False}) for column in found]


def _wider(one: NestedField, other: NestedField, places: tuple[str, str]) -> PrimitiveType:
    for narrow, wide in ((one, other), (other, one)):
        try:
            promote(narrow.field_type, wide.field_type)
        except ResolveError:
            continue
        return wide.field_type  # type: ignore[return-value]  # only primitive types are promoted
    raise SpecInvalid(
        f"expected one type of column {one.name!r} in all files, found {one.field_type} in {places[0]!r} and {other.field_type} "
        f"in {places[1]!r}: register them as two tables, or write one of them again"
    )


def _keys(path: str, root: str) -> dict[str, str | None]:
    folders = path[len(root) + 1 :].split("/")[:-1]
    parts = (unquote(folder).partition("=") for folder in folders if "=" in folder)
    return {key: None if value == _NULL else value for key, _, value in parts}


def _check_keys(files: Sequence[ParquetFile]) -> None:
    first = files[0]
    for file in files:
        if list(file.keys) != list(first.keys):
            raise SpecInvalid(
                f"expected the same partition keys in the folders of all files, found {list(first.keys)!r} for {first.address!r} "
                f"and {list(file.keys)!r} for {file.address!r}: name one kind of them by a pattern"
            )


def _key_columns(files: Sequence[ParquetFile]) -> list[NestedField]:
    """Return the partition keys as columns: long if all values are integers, else string."""
    columns = []
    for key in files[0].keys:
        values = {file.keys[key] for file in files}
        whole = all(value is None or _INTEGER.fullmatch(value) for value in values)
        columns.append(NestedField(-1, key, LongType() if whole else StringType(), required=False))
    return columns
