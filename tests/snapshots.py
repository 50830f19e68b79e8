"""Snapshots of a catalog's tables that engines commit and pyiceberg cannot: rewrites, and deletes by delete files."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

_POSITIONS = pa.schema(
    [
        pa.field("file_path", pa.string(), nullable=False, metadata={"PARQUET:field_id": "2147483546"}),
        pa.field("pos", pa.int64(), nullable=False, metadata={"PARQUET:field_id": "2147483545"}),
    ]
)


@dataclass(frozen=True, kw_only=True)
class DeleteFile:
    """A delete file to write: its rows, and the ids of the columns by which they delete, if not by position."""

    rows: pa.Table
    equality_ids: list[int] | None = None


class _DeleteManifest(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES


def position_rows(deletes: Mapping[str, Iterable[int]]) -> pa.Table:
    """Return the rows of a positional delete file (data file -> positions), in the order of the specification."""
    pairs = [(path, position) for path in sorted(deletes) for position in sorted(deletes[path])]
    paths = pa.array([path for path, _ in pairs], pa.string())
    return pa.Table.from_arrays([paths, pa.array([position for _, position in pairs], pa.int64())], schema=_POSITIONS)


def commit_snapshot(
    table: Table,
    operation: Operation,
    *,
    removed: Collection[str] = (),
    added: Iterable[pa.Table] = (),
    deletes: DeleteFile | None = None,
) -> None:
    """Commit a snapshot with an `operation`, without some data files (paths), with new ones and a delete file."""
    with table.transaction() as transaction:
        producer = transaction.update_snapshot().overwrite()
        for file in _data_files(table):
            if file.file_path in removed:
                producer.delete_data_file(file)
        for rows in added:
            for file in _dataframe_to_data_files(table.metadata, rows, table.io):
                producer.append_data_file(file)
        _set_operation(producer, operation)
        if deletes is not None:
            _with_deletes(producer, table, deletes)
        producer.commit()


def _data_files(table: Table) -> list[DataFile]:
    """Return the live data files as in pyiceberg, whose scan refuses tables with equality deletes."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    manifests = [one for one in snapshot.manifests(table.io) if one.content == ManifestContent.DATA]
    return [entry.data_file for one in manifests for entry in one.fetch_manifest_entry(table.io, discard_deleted=True)]


def _set_operation(producer: Any, operation: Operation) -> None:
    """Set the operation of an uncommitted snapshot. pyiceberg has no `replace`."""
    summarize = producer._summary
    producer._summary = lambda *args, **options: Summary(operation, **summarize(*args, **options).additional_properties)


def _with_deletes(producer: Any, table: Table, deletes: DeleteFile) -> None:
    """Add a delete file to an uncommitted snapshot. pyiceberg writes no delete files."""
    manifests: Callable[[], Sequence[ManifestFile]] = producer._manifests
    snapshot, location = producer.snapshot_id, table.location()
    path = f"{location}/data/deletes-{snapshot}.parquet"
    target = Path(path.removeprefix("file://"))
    pq.write_table(deletes.rows, target)
    content = DataFileContent.EQUALITY_DELETES if deletes.equality_ids else DataFileContent.POSITION_DELETES
    size, ids = target.stat().st_size, deletes.equality_ids
    written: dict[str, Any] = {"file_path": path, "file_format": FileFormat.PARQUET, "file_size_in_bytes": size}
    rows: dict[str, Any] = {"partition": Record(), "record_count": len(deletes.rows), "equality_ids": ids}
    file = DataFile.from_args(content=content, **written, **rows)

    def with_deletes() -> list[ManifestFile]:
        output = table.io.new_output(f"{location}/metadata/deletes-{snapshot}.avro")
        with _DeleteManifest(table.spec(), table.schema(), output, snapshot, "deflate") as writer:
            writer.add(
                ManifestEntry.from_args(
                    status=ManifestEntryStatus.ADDED, snapshot_id=snapshot, sequence_number=None, data_file=file
                )
            )
        return [*manifests(), writer.to_manifest_file()]

    producer._manifests = with_deletes


def check_readable(lakehouse: Lakehouse) -> None:
    """Read each retained snapshot of the ledger."""
    table = lakehouse.own("consumption")
    for snapshot in table.snapshots():
        table.scan(snapshot_id=snapshot.snapshot_id).to_arrow()
