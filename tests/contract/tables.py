"""Source tables of the contract: real Iceberg tables that are appended to, deleted from and compacted as engines do it.

The table itself keeps which rows should be live, by row id, so that nothing of what is tested says what is expected.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import _dataframe_to_data_files
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.typedef import Record

from catalog.connect import Lakehouse
from catalog.data_files import live_files

MakeRows = Callable[[Sequence[int]], pa.Table]
"""Row ids -> rows, with a column row_id."""


class _DeleteManifest(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES


@cache
def ids_in(path: str) -> list[int]:
    """The row ids of a data file, by position."""
    ids: list[int] = pq.read_table(path.removeprefix("file://"), columns=["row_id"])["row_id"].to_pylist()
    return ids


@dataclass
class SourceTable:
    """A table in a catalog; row ids count up and never come again."""

    lakehouse: Lakehouse
    name: str
    make_rows: MakeRows
    row_group_rows: int = 8
    ids: int = 0
    """Row ids given so far."""
    dead: set[int] = field(default_factory=set)
    merged: set[int] = field(default_factory=set)
    """Rows that a compaction has moved."""
    random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        limit = {"write.parquet.row-group-limit": str(self.row_group_rows)}
        self.lakehouse.catalog.create_table(self.name, self.make_rows([0]).schema, properties=limit)

    @property
    def table(self) -> Table:
        """The table as it is now."""
        return self.lakehouse.load(self.name)

    @property
    def snapshot_id(self) -> int:
        """The current snapshot."""
        current = self.table.current_snapshot()
        assert current is not None
        return current.snapshot_id

    @property
    def live(self) -> set[int]:
        """The rows that are live."""
        return set(range(self.ids)) - self.dead

    def append(self, rows: int) -> None:
        """Append a data file with new rows."""
        with self._named():
            self.table.append(self.make_rows(range(self.ids, self.ids + rows)))
        self.ids += rows

    def delete(self, rows: Iterable[int]) -> None:
        """Delete as pyiceberg does: files are dropped or written again."""
        chosen = sorted(set(rows) & self.live)
        if chosen:
            with self._named():
                self.table.delete(f"row_id in ({', '.join(map(str, chosen))})")
            self.dead |= set(chosen)

    def delete_positions(self, rows: Iterable[int]) -> None:
        """Delete by a positional delete file."""
        chosen = set(rows) & self.live
        dead = {path: [at for at, row in enumerate(ids_in(path)) if row in chosen] for path in self.paths()}
        pairs = sorted((path, position) for path, positions in dead.items() for position in positions)
        if pairs:
            fields = [("file_path", pa.string(), "2147483546"), ("pos", pa.int64(), "2147483545")]
            deletes = _with_ids([list(column) for column in zip(*pairs, strict=True)], fields)
            self._commit_deletes(deletes, DataFileContent.POSITION_DELETES)
            self.dead |= chosen

    def delete_equal(self, rows: Iterable[int]) -> None:
        """Delete by an equality delete file on row_id."""
        chosen = sorted(set(rows) & self.live)
        if chosen:
            field_id = self.table.schema().find_field("row_id").field_id
            deletes = _with_ids([chosen], [("row_id", pa.int64(), str(field_id))])
            self._commit_deletes(deletes, DataFileContent.EQUALITY_DELETES, equality_ids=[field_id])
            self.dead |= set(chosen)

    def compact(self, files: Sequence[int] = ()) -> None:
        """Merge the live rows of some data files, by number (all by default), into one."""
        paths = self.paths()
        chosen = [paths[index % len(paths)] for index in files] or paths
        rows = [row for path in dict.fromkeys(chosen) for row in ids_in(path) if row not in self.dead]
        self._commit([*dict.fromkeys(chosen)], rows, Operation.REPLACE)
        self.merged |= set(rows)

    def paths(self) -> list[str]:
        """The live data files."""
        return [file.path for file in live_files(self.table, self.snapshot_id)]

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Files get names that are the same whenever an example is repeated: their order decides that of the units."""
        with patch.object(uuid, "uuid4", lambda: uuid.UUID(int=self.random.getrandbits(128), version=4)):
            yield

    def _commit(self, removed: Sequence[str], rows: Sequence[int], operation: Operation) -> None:
        table = self.table
        files = dict.fromkeys(removed)
        with self._named(), table.transaction() as transaction:
            producer = transaction.update_snapshot().overwrite()
            for file in _data_files(table):
                if file.file_path in files:
                    producer.delete_data_file(file)
            for added in _dataframe_to_data_files(table.metadata, self.make_rows(rows), table.io) if rows else ():
                producer.append_data_file(added)
            _say(producer, operation)
            producer.commit()

    def _commit_deletes(self, deletes: pa.Table, content: DataFileContent, **more: Any) -> None:
        table = self.table
        with self._named(), table.transaction() as transaction:
            producer = transaction.update_snapshot().overwrite()
            _say(producer, Operation.DELETE)
            _with_deletes(producer, table, deletes, content, more)
            producer.commit()


def _data_files(table: Table) -> list[DataFile]:
    """The live data files as pyiceberg knows them; its scan refuses tables with equality deletes."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifests = [one for one in snapshot.manifests(table.io) if one.content == ManifestContent.DATA]
    return [entry.data_file for one in manifests for entry in one.fetch_manifest_entry(table.io, discard_deleted=True)]


def _say(producer: Any, operation: Operation) -> None:
    """Make a snapshot under way say that it was another operation: pyiceberg has no `replace` of its own."""
    summarize = producer._summary
    producer._summary = lambda *args, **options: Summary(operation, **summarize(*args, **options).additional_properties)


def _with_ids(columns: list[list[Any]], fields: list[tuple[str, pa.DataType, str]]) -> pa.Table:
    schema = pa.schema([pa.field(name, kind, False, {"PARQUET:field_id": number}) for name, kind, number in fields])
    return pa.table(columns, schema=schema)


def _with_deletes(
    producer: Any, table: Table, deletes: pa.Table, content: DataFileContent, more: Mapping[str, Any]
) -> None:
    """Give a snapshot under way a delete file: pyiceberg writes none of its own."""
    manifests: Callable[[], list[ManifestFile]] = producer._manifests
    snapshot = producer.snapshot_id
    location = table.location()
    path = f"{location}/data/deletes-{snapshot}.parquet"
    target = Path(path.removeprefix("file://"))
    pq.write_table(deletes, target)
    file = DataFile.from_args(
        content=content,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(),
        record_count=len(deletes),
        file_size_in_bytes=target.stat().st_size,
        **more,
    )

    def with_deletes() -> list[ManifestFile]:
        output = table.io.new_output(f"{location}/metadata/deletes-{snapshot}.avro")
        with _DeleteManifest(table.spec(), table.schema(), output, snapshot, "deflate") as writer:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED,
                    snapshot_id=snapshot,
                    sequence_number=None,
                    file_sequence_number=None,
                    data_file=file,
                )
            )
        return [*manifests(), writer.to_manifest_file()]

    producer._manifests = with_deletes
