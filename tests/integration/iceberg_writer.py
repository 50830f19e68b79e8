"""Iceberg tables written by hand, as pyiceberg writes no deletes and no v3, with any sequence numbers and field ids."""

import json
import uuid
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.avro.file import AvroOutputFile
from pyiceberg.io import OutputFile
from pyiceberg.io.pyarrow import (
    PyArrowFileIO,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
    schema_to_pyarrow,
)
from pyiceberg.manifest import (
    MANIFEST_LIST_FILE_SCHEMAS,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable
from pyiceberg.typedef import Record
from pyroaring import BitMap64

from tests.snapshots import position_rows

Version = Literal[2, 3]
IO = PyArrowFileIO()


@dataclass(frozen=True, kw_only=True)
class Written:
    """A file of a table as the oracle (iceberg_oracle.py) needs to know it. `columns` has the columns of an equality delete."""

    path: str
    sequence: int
    content: DataFileContent
    partition: tuple[int, tuple[Any, ...]] | None
    columns: tuple[str, ...] = ()
    positions: Mapping[str, Sequence[int]] = field(default_factory=dict)


@dataclass
class HandTable:
    """A table under `root`; every method commits one snapshot."""

    root: Path
    schemas: list[Schema]
    specs: list[PartitionSpec] = field(default_factory=lambda: [UNPARTITIONED_PARTITION_SPEC])
    version: Version = 2
    properties: dict[str, str] = field(default_factory=dict)
    sequence: int = 0
    next_row_id: int = 0
    files: list[Written] = field(default_factory=list)
    manifests: list[ManifestFile] = field(default_factory=list)
    snapshots: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def append(
        self,
        rows: pa.Table,
        *,
        schema: Schema | None = None,
        spec: int = 0,
        partition: tuple[Any, ...] = (),
        sequence: int | None = None,
        row_group_rows: int = 4,
        ids: bool = True,
        statistics: bool = True,
        row_id: int | None = None,
        footer: bool = True,
    ) -> str:
        """Commit a data file and return its path; without `ids` it has no field ids, without `footer` no statistics in it."""
        schema = schema or self.schemas[-1]
        arrow = schema_to_pyarrow(schema, include_field_ids=ids)
        written = rows.select(arrow.names).cast(arrow) if ids else rows
        path = self._path("data.parquet")
        pq.write_table(written, path, row_group_size=row_group_rows, write_statistics=footer)
        found = self._statistics(path, schema) if statistics else {"record_count": len(rows), "split_offsets": None}
        file = self.file(path, DataFileContent.DATA, partition, **found, first_row_id=row_id)
        return self._put([file], spec, sequence, partition)

    def delete_positions(
        self,
        deletes: Mapping[str, Sequence[int]],
        *,
        spec: int = 0,
        partition: tuple[Any, ...] = (),
        sequence: int | None = None,
        bounds: bool = False,
        referenced: bool = False,
    ) -> str:
        """Commit a positional delete file; with `bounds` or `referenced` its metadata name the data files."""
        rows = position_rows(deletes)
        path = self._path("positions.parquet")
        pq.write_table(rows, path)
        more: dict[str, Any] = {"record_count": len(rows)}
        if bounds:
            more |= {
                "lower_bounds": {2147483546: min(deletes).encode()},
                "upper_bounds": {2147483546: max(deletes).encode()},
            }
        if referenced:
            (more["referenced_data_file"],) = deletes
        file = self.file(path, DataFileContent.POSITION_DELETES, partition, **more)
        return self._put([file], spec, sequence, partition)

    def delete_equal(
        self,
        rows: pa.Table,
        *,
        schema: Schema | None = None,
        spec: int = 0,
        partition: tuple[Any, ...] = (),
        sequence: int | None = None,
        ids: bool = True,
    ) -> str:
        """Commit an equality delete file on the columns of `rows`, which are columns of `schema`."""
        schema = schema or self.schemas[-1]
        fields = [schema.find_field(name) for name in rows.column_names]
        arrow = schema_to_pyarrow(
            Schema(*(one.model_copy(update={"required": False}) for one in fields)), include_field_ids=ids
        )
        path = self._path("equal.parquet")
        pq.write_table(rows.cast(arrow), path)
        more = {"record_count": len(rows), "equality_ids": [one.field_id for one in fields]}
        file = self.file(path, DataFileContent.EQUALITY_DELETES, partition, **more)
        return self._put([file], spec, sequence, partition, columns=tuple(rows.column_names))

    def delete_vectors(
        self,
        deletes: Mapping[str, Sequence[int]],
        *,
        sequence: int | None = None,
        file_format: FileFormat = FileFormat.PUFFIN,
    ) -> str:
        """Commit one Puffin file with a deletion vector for each data file; the manifest calls it `file_format`."""
        path = self._path("vectors.puffin")
        blobs = {one: vector_blob(positions) for one, positions in deletes.items()}
        offset, files, named = 4, [], []
        for one, blob in blobs.items():
            more = {
                "record_count": len(set(deletes[one])),
                "referenced_data_file": one,
                "content_offset": offset,
                "content_size_in_bytes": len(blob),
            }
            files.append(self.file(path, DataFileContent.POSITION_DELETES, (), **more, file_format=file_format))
            named.append(named_blob(offset, len(blob)))
            offset += len(blob)
        Path(path).write_bytes(b"PFA1" + b"".join(blobs.values()) + puffin_footer(named))
        return self._put(files, 0, sequence, (), positions=deletes)

    @property
    def snapshot_id(self) -> int:
        """The current snapshot."""
        return int(self.snapshots[-1]["snapshot-id"])

    @property
    def table(self) -> StaticTable:
        """The table as it stands."""
        return StaticTable.from_metadata(self.write_metadata())

    def write_metadata(self) -> str:
        """Write the table's metadata; returns the path."""
        specs = [json.loads(spec.model_dump_json()) for spec in self.specs]
        metadata: dict[str, Any] = {
            "format-version": self.version,
            "table-uuid": str(uuid.UUID(int=1)),
            "location": str(self.root),
            "last-sequence-number": self.sequence,
            "last-updated-ms": 1_700_000_000_000 + len(self.snapshots),
            "last-column-id": max(schema.highest_field_id for schema in self.schemas),
            "current-schema-id": self.schemas[-1].schema_id,
            "schemas": [json.loads(schema.model_dump_json()) for schema in self.schemas],
            "default-spec-id": self.specs[-1].spec_id,
            "partition-specs": specs,
            "last-partition-id": max([999, *(spec.last_assigned_field_id for spec in self.specs)]),
            "default-sort-order-id": 0,
            "sort-orders": [{"order-id": 0, "fields": []}],
            "properties": self.properties,
            "snapshots": self.snapshots,
            **({"next-row-id": self.next_row_id} if self.version == 3 else {}),
        }
        if self.snapshots:
            ref = {"snapshot-id": self.snapshot_id, "type": "branch"}
            metadata |= {"current-snapshot-id": self.snapshot_id, "refs": {"main": ref}}
        path = self.root / f"v{len(self.snapshots)}.metadata.json"
        path.write_text(json.dumps(metadata))
        return str(path)

    def _path(self, name: str) -> str:
        return str(self.root / f"{len(self.snapshots):03}-{name}")

    def _statistics(self, path: str, schema: Schema) -> dict[str, Any]:
        return data_file_statistics_from_parquet_metadata(
            parquet_metadata=pq.read_metadata(path),
            stats_columns=compute_statistics_plan(schema, self.properties),
            parquet_column_mapping=parquet_path_to_id_mapping(schema),
        ).to_serialized_dict()

    def file(self, path: str, content: DataFileContent, partition: tuple[Any, ...], **more: Any) -> DataFile:
        """Return a file's entry of a manifest."""
        more = {"file_format": FileFormat.PARQUET, "file_size_in_bytes": 1, **more}
        return DataFile.from_args(
            _table_format_version=3, content=content, file_path=path, partition=Record(*partition), **more
        )

    def _put(
        self, files: list[DataFile], spec: int, sequence: int | None, partition: tuple[Any, ...], **noted: Any
    ) -> str:
        """Commit files at one path, note them for the oracle, and return the path."""
        self.commit(files, spec, sequence)
        path, content = files[0].file_path, files[0].content
        where = None if self.specs[spec].is_unpartitioned() else (spec, partition)
        self.files.append(Written(path=path, sequence=self._last, content=content, partition=where, **noted))
        return path

    def commit(
        self, files: list[DataFile], spec: int, sequence: int | None, removed: Sequence[ManifestEntry] = ()
    ) -> None:
        """Add a snapshot with more files."""
        self.sequence += 1
        self._last = self.sequence if sequence is None else sequence
        snapshot_id = 1000 + self.sequence
        kind = ManifestContent.DATA if files[0].content is DataFileContent.DATA else ManifestContent.DELETES
        output = IO.new_output(self._path("manifest.avro"))
        with _Manifest(self.specs[spec], self.schemas[-1], output, snapshot_id, kind, self.version) as writer:
            for file in files:
                writer.add_entry(
                    ManifestEntry.from_args(
                        status=ManifestEntryStatus.ADDED,
                        snapshot_id=snapshot_id,
                        sequence_number=sequence,
                        data_file=file,
                    )
                )
            for entry in removed:
                writer.delete(entry)
        manifest = ManifestFile(*writer.to_manifest_file()._data, None)
        manifest.sequence_number = self.sequence
        manifest.min_sequence_number = min(self._last, self.sequence)
        self._add(manifest, snapshot_id)

    def _add(self, manifest: ManifestFile, snapshot_id: int) -> None:
        added = 0
        if self.version == 3 and manifest.content is ManifestContent.DATA:
            manifest[15] = self.next_row_id
            added = manifest.added_rows_count or 0
        self.manifests.append(manifest)
        path = self._path("manifests.avro")
        schema = MANIFEST_LIST_FILE_SCHEMAS[self.version]
        with AvroOutputFile[ManifestFile](
            output_file=IO.new_output(path),
            record_schema=MANIFEST_LIST_FILE_SCHEMAS[3],
            file_schema=schema,
            schema_name="manifest_file",
            metadata={"format-version": str(self.version)},
        ) as writer:
            writer.write_block(self.manifests)
        ids = {"first-row-id": self.next_row_id, "added-rows": added} if self.version == 3 else {}
        parent = {"parent-snapshot-id": self.snapshots[-1]["snapshot-id"]} if self.snapshots else {}
        self.next_row_id += added
        self.snapshots.append(
            {
                "snapshot-id": snapshot_id,
                "sequence-number": self.sequence,
                "timestamp-ms": 1_700_000_000_000 + self.sequence,
                "manifest-list": path,
                "summary": {"operation": "append" if manifest.content is ManifestContent.DATA else "delete"},
                "schema-id": self.schemas[-1].schema_id,
                **parent,
                **ids,
            }
        )


class _Manifest(ManifestWriterV2):
    """A manifest of either content, in format v2 or v3."""

    def __init__(
        self,
        spec: PartitionSpec,
        schema: Schema,
        output: OutputFile,
        snapshot_id: int,
        kind: ManifestContent,
        version: Version,
    ) -> None:
        super().__init__(spec, schema, output, snapshot_id, "deflate")
        self._kind, self._version = kind, version

    def content(self) -> ManifestContent:
        """What the manifest lists."""
        return self._kind

    @property
    def version(self) -> Version:
        """The format version."""
        return self._version

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "data" if self._kind is ManifestContent.DATA else "deletes"}

    def new_writer(self) -> AvroOutputFile[ManifestEntry]:
        """A writer of records that have the fields of v3."""
        return AvroOutputFile[ManifestEntry](
            output_file=self._output_file,
            file_schema=self._with_partition(self.version),
            record_schema=self._with_partition(3),
            schema_name="manifest_entry",
            metadata=self._meta,
        )


def vector_blob(positions: Sequence[int]) -> bytes:
    """A deletion vector as the Puffin specification lays it out."""
    body = b"\xd1\xd3\x39\x64" + BitMap64(positions).serialize()
    return len(body).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")


def named_blob(offset: int, length: int) -> dict[str, Any]:
    """A blob as the footer of a Puffin file names it."""
    made = {"fields": [2147483645], "snapshot-id": -1, "sequence-number": -1}
    return {"type": "deletion-vector-v1", "offset": offset, "length": length, **made}


def puffin_footer(blobs: object) -> bytes:
    """The footer of a Puffin file that names these blobs."""
    payload = json.dumps({"blobs": blobs}).encode()
    return b"PFA1" + payload + len(payload).to_bytes(4, "little") + bytes(4) + b"PFA1"
