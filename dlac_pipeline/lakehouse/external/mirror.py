"""Mirrors of tables of other formats: an Iceberg table of the lakehouse's own catalog over the data files in their place.

One version becomes one snapshot, whose id is the version's number. Nothing is copied but the positions of dead rows. So plans,
legs, readers and audits see an Iceberg table, and know no other format. `main` has versions in growing order. A version that
is older than its head is a snapshot apart. See docs/design/0017-other-formats.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSelector
from pyiceberg.exceptions import TableAlreadyExistsError
from pyiceberg.io.pyarrow import PyArrowFileIO, _pyarrow_to_schema_without_ids, schema_to_pyarrow
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
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH, SnapshotRefType
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AssertCurrentSchemaId,
    AssertLastAssignedFieldId,
    AssertRefSnapshotId,
    SetCurrentSchemaUpdate,
    SetDefaultSpecUpdate,
    TableUpdate,
)
from pyiceberg.table.update.snapshot import _SnapshotProducer
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import EMPTY_DICT, Record
from pyiceberg.types import NestedField

from dlac_pipeline.lakehouse.errors import AppendHistoryLost, CommitConflict, NoSuchSnapshot, NoSuchTable, PinLost
from dlac_pipeline.lakehouse.external.delta import DeltaSource
from dlac_pipeline.lakehouse.external.locations import mirror_name, split_identifier
from dlac_pipeline.lakehouse.external.versions import ExternalFile, ExternalTable, ExternalVersion, storage_options
from dlac_pipeline.lakehouse.iceberg.columns import READ_BY_NAME
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.iceberg.data_files import PATH_FIELD_ID, live_files
from dlac_pipeline.lakehouse.iceberg.deletes import POSITION_FIELD_ID, Deletes
from dlac_pipeline.lakehouse.iceberg.transactions import LeanTransaction
from dlac_pipeline.lakehouse.maintenance.expiry import expire_in
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying

TABLE_ID = "dlac.external.table-id"
"""Property of a mirror: the id that the other format gives the table."""
_MOST_STEPS = 100
"""With more new versions than these, one snapshot has the changes of all of them."""
_KEPT_SNAPSHOTS = 200
"""Without a pin. An expired one is mirrored again when it is asked for."""
_THREADS = 8
_POSITIONS = pa.schema(
    [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": str(PATH_FIELD_ID)}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": str(POSITION_FIELD_ID)}),
    ]
)


def load_version(lakehouse: Lakehouse, identifier: str, number: int | None = None) -> Table:
    """Return a source table as it is now. Of another format, a version is mirrored first: the newest unless `number` names one.

    Raises:
        NoSuchTable, NoSuchSnapshot: there is no such table or version.
        UnsupportedSnapshot: the version cannot be read exactly.
        AppendHistoryLost: the table has lost versions that were read before.
        CommitConflict: other processes mirror the table all the time.
    """
    place = split_identifier(identifier)
    if place is None:
        return lakehouse.load(identifier)
    if number is not None:
        with suppress(NoSuchTable):
            table = lakehouse.load(identifier)
            if table.snapshot_by_id(number) is not None:
                return table
    properties = lakehouse.config.catalog_properties()
    source = DeltaSource(place[1], storage_options(properties), PyArrowFileIO(properties))
    return retrying(of=CommitConflict)(partial(_mirror, lakehouse, identifier, source, number))


def check_files(lakehouse: Lakehouse, identifier: str, number: int, paths: Iterable[str]) -> None:
    """Check that the data files of a version still exist. Tables of catalogs are left to their pins.

    Raises:
        PinLost: some are gone.
    """
    place = split_identifier(identifier)
    if place is None:
        return
    io = PyArrowFileIO(lakehouse.config.catalog_properties())
    scheme, netloc, root = io.parse_location(place[1], io.properties)
    selector = FileSelector(root, recursive=True, allow_not_found=True)
    known = {info.path for info in io.fs_by_scheme(scheme, netloc).get_file_info(selector)}
    mine = [path for path in paths if path.startswith(f"{place[1]}/")]  # a clone's files are another table's
    gone = sorted(path for path in mine if io.parse_location(path, io.properties)[2] not in known)
    if gone:
        raise PinLost(
            f"expected {len(mine)} data files of version {number} of {identifier!r}, as planned, found {len(gone)} gone, "
            f"such as {gone[0]!r}: VACUUM removes files that newer versions do not need; restore them from a backup, or start a "
            "new run on the newest version, and let VACUUM keep files (delta.deletedFileRetentionDuration) longer than runs take"
        )


def retained_snapshots(table: Table) -> set[int]:
    """Return the snapshots whose data files must exist. Of a mirror these are the pinned ones, as VACUUM knows no others."""
    if TABLE_ID in table.properties:
        return {ref.snapshot_id for ref in table.refs().values() if ref.snapshot_ref_type == SnapshotRefType.TAG}
    return {kept.snapshot_id for kept in table.metadata.snapshots}


def _mirror(lakehouse: Lakehouse, identifier: str, source: ExternalTable, number: int | None) -> Table:
    wanted = source.newest if number is None else number
    table = _find_or_create(lakehouse, identifier, source, wanted)
    head = table.current_snapshot()
    newest = -1 if head is None else head.snapshot_id
    if source.newest < newest:
        raise AppendHistoryLost(
            f"expected {identifier!r} to have version {newest}, which was read before, found versions up to {source.newest}: its "
            "log was restored from an older copy; restore the newer one, or use a table at another location"
        )
    if table.snapshot_by_id(wanted) is not None:
        return table
    on_main = wanted > newest
    numbers = source.numbers(newest, wanted) if on_main and head is not None else [wanted]
    for version in _readable(source, numbers):
        _commit(lakehouse, table, version, on_main=on_main)
        table = lakehouse.load(identifier)
    return table


def _readable(source: ExternalTable, numbers: Sequence[int]) -> Iterator[ExternalVersion]:
    """Yield the versions whose log still exists. The last one must. The one after a gap has the changes of the gap."""
    gap = len(numbers) > _MOST_STEPS
    for number in numbers[-1:] if gap else numbers:
        try:
            version = source.read(number)
        except NoSuchSnapshot:
            if number == numbers[-1]:
                raise
            gap = True
        else:
            yield replace(version, only_rewrites=version.only_rewrites and not gap)
            gap = False


def _find_or_create(lakehouse: Lakehouse, identifier: str, source: ExternalTable, number: int) -> Table:
    """Return the mirror. Replace that of another table, which was at the same location before."""
    with suppress(NoSuchTable):
        table = lakehouse.load(identifier)
        if table.properties.get(TABLE_ID) == source.table_id:
            return table
        lakehouse.catalog.drop_table(table.name())
    name = mirror_name(identifier, lakehouse.config.namespace)
    lakehouse.create_namespace(name.rpartition(".")[0])
    properties = {
        TABLE_ID: source.table_id,
        READ_BY_NAME: "true",
        "dlac.external.table": identifier,
        "gc.enabled": "false",  # other engines would delete the data files, which are the other table's
        "commit.retry.num-retries": "0",
        "write.metadata.delete-after-commit.enabled": "true",
        "write.metadata.previous-versions-max": "10",
    }
    with reachable(lakehouse.config.uri), suppress(TableAlreadyExistsError):
        lakehouse.catalog.create_table(name, Schema(*_columns(source.read(number).schema)), properties=properties)
    return lakehouse.load(identifier)


def _commit(lakehouse: Lakehouse, table: Table, version: ExternalVersion, *, on_main: bool) -> None:
    """Add the snapshot of a version, unless another process was faster.

    Raises:
        CommitConflict: it was.
    """
    head = table.current_snapshot()
    metadata = table.metadata
    unmoved = (
        AssertRefSnapshotId.model_validate(
            {"ref": MAIN_BRANCH, "snapshot-id": None if head is None else head.snapshot_id}
        ),
        AssertLastAssignedFieldId.model_validate({"last-assigned-field-id": metadata.last_column_id}),
        AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
    )
    try:
        with reachable(lakehouse.config.uri), as_commit_conflict(), LeanTransaction(table) as transaction:
            transaction._apply(tuple(_layout_updates(metadata, version)), unmoved)
            snapshot = _VersionSnapshot(transaction, table, version, MAIN_BRANCH if on_main else None)
            transaction._apply(*snapshot._commit())
            expire_in(transaction, keep=_KEPT_SNAPSHOTS)
    except ValueError as err:  # pyiceberg's of a snapshot that exists
        raise CommitConflict(f"version {version.number} of {table.name()!r} was mirrored by others: {err}") from err


def _columns(schema: pa.Schema) -> list[NestedField]:
    """Return the columns as Iceberg has them, without field ids. All are optional, as older files may lack them."""
    found = _pyarrow_to_schema_without_ids(schema.remove_metadata()).fields
    return [field.model_copy(update={"required": False}) for field in found]


def _schema(metadata: TableMetadata, wanted: pa.Schema) -> Schema:
    """Return these columns as a schema of the mirror. A column keeps its field id as long as it keeps name and type."""
    known = {_kind(field): field for schema in metadata.schemas for field in schema.fields}
    next_id = count(metadata.last_column_id + 1).__next__
    fields = [
        known.get(_kind(field)) or assign_fresh_schema_ids(Schema(field), next_id).fields[0]
        for field in _columns(wanted)
    ]
    same = (schema for schema in metadata.schemas if list(schema.fields) == fields)
    return next(same, Schema(*fields, schema_id=max(each.schema_id for each in metadata.schemas) + 1))


def _kind(field: NestedField) -> tuple[str, str]:
    return field.name, str(schema_to_pyarrow(field.field_type, include_field_ids=False))


def _spec(metadata: TableMetadata, schema: Schema, columns: Sequence[str]) -> PartitionSpec:
    """Return the spec of the mirror with the identities of these columns."""
    ids = {name: schema.find_field(name).field_id for name in columns}
    fields = tuple(
        PartitionField(source_id=field_id, field_id=1000 + field_id, transform=IdentityTransform(), name=name)
        for name, field_id in ids.items()
    )
    same = (spec for spec in metadata.partition_specs if spec.fields == fields)
    return next(same, PartitionSpec(*fields, spec_id=max(spec.spec_id for spec in metadata.partition_specs) + 1))


def _layout_updates(metadata: TableMetadata, version: ExternalVersion) -> Iterator[TableUpdate]:
    """Make the version's schema and partitions those of the mirror."""
    schema = _schema(metadata, version.schema)
    spec = _spec(metadata, schema, version.partition_columns)
    if schema not in metadata.schemas:
        yield AddSchemaUpdate(schema=schema)
    yield SetCurrentSchemaUpdate.model_validate({"schema-id": schema.schema_id})
    if spec not in metadata.partition_specs:
        yield AddPartitionSpecUpdate(spec=spec)
    yield SetDefaultSpecUpdate.model_validate({"spec-id": spec.spec_id})


class _VersionSnapshot(_SnapshotProducer["_VersionSnapshot"]):
    """The snapshot of a version: its changes since the head of `main`, or all of it as a snapshot apart."""

    def __init__(self, transaction: Transaction, table: Table, version: ExternalVersion, branch: str | None) -> None:
        super().__init__(Operation.APPEND, transaction, table.io, branch=branch)
        self._snapshot_id, self._version = version.number, version
        if branch is None:
            self._parent_snapshot_id = None
        before = [] if self._parent_snapshot_id is None else live_files(table, self._parent_snapshot_id)
        deletes = Deletes(table, table.schema())
        dead = {file.path: deletes.positions(file) for file in before}
        sizes = {file.path: file.bytes for file in before}
        files = version.files.values()
        # a file with rows that live again counts as removed and added
        kept = {each.path for each in files if sizes.get(each.path) == each.bytes and each.has_dead(dead[each.path])}
        self._removed = sizes.keys() - kept
        self._added = [each for each in files if each.path not in kept]
        self._died = [each for each in files if len(each.dead) > (len(dead[each.path]) if each.path in kept else 0)]

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        if not self._removed and not self._died:
            return Summary(Operation.APPEND)
        if self._version.only_rewrites:
            return Summary(Operation.REPLACE)
        return Summary(Operation.OVERWRITE if self._added else Operation.DELETE)

    def _manifests(self) -> list[ManifestFile]:
        added = self._new_manifest(self._data_files(), ManifestContent.DATA)
        return [*self._existing_manifests(), *added, *self._new_manifest(self._delete_files(), ManifestContent.DELETES)]

    def _deleted_entries(self) -> list[ManifestEntry]:
        return []  # they are written with those that stay

    def _existing_manifests(self) -> list[ManifestFile]:
        """Return the parent's manifests. Those of data are written again if files were removed."""
        parent = self._transaction.table_metadata.snapshot_by_id(self._parent_snapshot_id or 0)
        manifests = [] if self._parent_snapshot_id is None or parent is None else parent.manifests(self._io)
        kept = [each for each in manifests if not self._removed or each.content == ManifestContent.DELETES]
        by_spec: dict[int, list[ManifestEntry]] = defaultdict(list)
        for manifest in manifests:
            if manifest not in kept:
                by_spec[manifest.partition_spec_id] += manifest.fetch_manifest_entry(self._io)
        return [*(self._rewritten(spec_id, entries) for spec_id, entries in by_spec.items() if entries), *kept]

    def _rewritten(self, spec_id: int, entries: Sequence[ManifestEntry]) -> ManifestFile:
        with self._manifest(spec_id, ManifestContent.DATA) as writer:
            for entry in entries:
                write = writer.delete if entry.data_file.file_path in self._removed else writer.existing
                write(entry)
        return writer.to_manifest_file()

    def _data_files(self) -> list[DataFile]:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
            rows = list(pool.map(lambda file: file.counted(self._io), self._added))
        files = zip(self._added, rows, strict=True)
        return [_data_file(file.path, file.partition, record_count=rows, size=file.bytes) for file, rows in files]

    def _delete_files(self) -> list[DataFile]:
        """Write one positional delete file for each partition with rows that died."""
        by_partition: dict[tuple[Any, ...], list[ExternalFile]] = defaultdict(list)
        for file in sorted(self._died, key=lambda file: file.path):
            by_partition[file.partition].append(file)
        return [self._delete_file(partition, files) for partition, files in by_partition.items()]

    def _delete_file(self, partition: tuple[Any, ...], files: Sequence[ExternalFile]) -> DataFile:
        paths = np.repeat([file.path for file in files], [len(file.dead) for file in files])
        rows = pa.table([pa.array(paths), np.concatenate([file.dead for file in files])], schema=_POSITIONS)
        output = self._io.new_output(
            self._transaction._table.location_provider().new_data_location(f"{uuid4()}.parquet")
        )
        with output.create() as stream:
            pq.write_table(rows, stream)
        return _data_file(
            output.location,
            partition,
            content=DataFileContent.POSITION_DELETES,
            record_count=len(rows),
            size=len(output),
            lower_bounds={PATH_FIELD_ID: files[0].path.encode()},
            upper_bounds={PATH_FIELD_ID: files[-1].path.encode()},
        )

    def _new_manifest(self, files: Sequence[DataFile], content: ManifestContent) -> list[ManifestFile]:
        if not files:
            return []
        with self._manifest(self._transaction.table_metadata.default_spec_id, content) as writer:
            for file in files:
                writer.add(ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, data_file=file))
        return [writer.to_manifest_file()]

    def _manifest(self, spec_id: int, content: ManifestContent) -> _Manifest:
        spec, schemas = self.spec(spec_id), reversed(self._transaction.table_metadata.schemas)
        # that of an older spec may name columns that the current schema has no longer
        schema = next(each for each in schemas if all(each.find_column_name(part.source_id) for part in spec.fields))
        writer = _Manifest(spec, schema, self.new_manifest_output(), self._snapshot_id, "deflate")
        writer.kind = content
        return writer


class _Manifest(ManifestWriterV2):
    """A manifest of data files or of delete files. pyiceberg's own writer knows data files only."""

    kind = ManifestContent.DATA

    def content(self) -> ManifestContent:
        """Return the kind of the files."""
        return self.kind

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "data" if self.kind == ManifestContent.DATA else "deletes"}


def _data_file(path: str, partition: tuple[Any, ...], *, size: int, **more: Any) -> DataFile:
    return DataFile.from_args(
        **{"content": DataFileContent.DATA, **more},
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(*partition),
        file_size_in_bytes=size,
    )
