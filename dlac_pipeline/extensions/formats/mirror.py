"""Mirrors of tables of other formats: an Iceberg table of the lakehouse's own catalog over the data files in their place.

One version becomes one snapshot, whose id is the version's number. See docs/design/0012-extensions.md.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from pyiceberg import manifest
from pyiceberg.exceptions import TableAlreadyExistsError
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO, _pyarrow_to_schema_without_ids, schema_to_pyarrow
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import Table, Transaction, update
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import Operation, Summary
from pyiceberg.table.update.snapshot import _OverwriteFiles
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import EMPTY_DICT, Record
from pyiceberg.types import NestedField

from dlac_pipeline.extensions.formats.versions import ExternalFile, ExternalTable, ExternalVersion
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg.columns import READ_BY_NAME
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.iceberg.data_files import PATH_FIELD_ID, live_files
from dlac_pipeline.lakehouse.iceberg.deletes import POSITION_FIELD_ID, Deletes
from dlac_pipeline.lakehouse.iceberg.sources import TABLE_ID, SourceFormat
from dlac_pipeline.lakehouse.maintenance.expiry import LeanTransaction, expire_in
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying
from dlac_pipeline.lakehouse.s3_objects import SETTINGS
from dlac_pipeline.lakehouse.source_names import mirror_name

_MOST_STEPS = 100
"""Most new versions with a snapshot each. With more, one snapshot has the changes of all."""
_KEPT_SNAPSHOTS = 200
"""Snapshots that are kept without a pin. An expired one is mirrored again when it is requested."""
_THREADS = 8
_POSITIONS = pa.schema(
    [
        pa.field("file_path", pa.string(), False, {"PARQUET:field_id": str(PATH_FIELD_ID)}),
        pa.field("pos", pa.int64(), False, {"PARQUET:field_id": str(POSITION_FIELD_ID)}),
    ]
)


class MirroredFormat(SourceFormat):
    """A format that lists the files of a version, from which the mirror is written."""

    def __init__(self, open_table: Callable[[str, Mapping[str, str], FileIO], ExternalTable]) -> None:
        """Take the function that opens a table: location, settings of the object store as AWS_* and as pyiceberg's file I/O."""
        self._open_table = open_table

    def load_version(self, lakehouse: Lakehouse, identifier: str, number: int | None) -> Table:
        """Return the mirror of a table, with this version as a snapshot. None: the newest version, as the head of main.

        Raises as `SourceFormat.load_version`.
        """
        properties, location = lakehouse.config.catalog_properties(), identifier.partition(":")[2]
        options = {f"AWS_{theirs.upper()}": properties[ours] for ours, theirs in SETTINGS.items() if ours in properties}
        io = PyArrowFileIO(dict(properties))
        table = self._open_table(location, {**options, "AWS_ALLOW_HTTP": "true"}, io)
        return retrying(of=errors.CommitConflict)(partial(_mirror, lakehouse, identifier, table, number))


def _mirror(lakehouse: Lakehouse, identifier: str, source: ExternalTable, number: int | None) -> Table:
    wanted = source.newest if number is None else number
    table = _find_or_create(lakehouse, identifier, source, wanted)
    head = table.current_snapshot()
    newest = -1 if head is None else head.snapshot_id
    if source.newest < newest:
        raise errors.AppendHistoryLost(
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
    """Yield the versions that can be read. The last one must. The one after a gap has the changes of the gap, too."""
    gap = len(numbers) > _MOST_STEPS
    for number in numbers[-1:] if gap else numbers:
        try:
            version = source.read(number)
        except (errors.NoSuchSnapshot, errors.UnsupportedSnapshot):
            if number == numbers[-1]:
                raise
            gap = True
        else:
            yield replace(version, only_rewrites=version.only_rewrites and not gap)
            gap = False


def _find_or_create(lakehouse: Lakehouse, identifier: str, source: ExternalTable, number: int) -> Table:
    """Return the mirror. Replace the mirror of another table, which was at the same location before."""
    with suppress(errors.NoSuchTable):
        table = lakehouse.load(identifier)
        if table.properties.get(TABLE_ID) == source.table_id:
            return table
        with reachable(lakehouse.config.uri):
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
    """Add the snapshot of a version. Raises `CommitConflict` if another process was faster."""
    metadata, head = table.metadata, table.current_snapshot()
    main = {"ref": MAIN_BRANCH, "snapshot-id": None if head is None else head.snapshot_id}
    unmoved = (  # sequence numbers on main grow, and so do ids of schemas
        update.AssertRefSnapshotId.model_validate(main),
        update.AssertCurrentSchemaId.model_validate({"current-schema-id": metadata.current_schema_id}),
    )
    branch = MAIN_BRANCH if on_main else f"version-{version.number}"
    try:
        with reachable(lakehouse.config.uri), as_commit_conflict(), LeanTransaction(table) as transaction:
            transaction._apply(tuple(_layout_updates(metadata, version)), unmoved)
            transaction._apply(*_VersionSnapshot(transaction, table, version, branch)._commit())
            expire_in(transaction, keep=_KEPT_SNAPSHOTS)
    except ValueError as err:
        if "last sequence number" not in str(err) and "already exists" not in str(err):
            raise
        raise errors.CommitConflict(
            f"a version was mirrored beside {version.number} of {table.name()!r}: {err}"
        ) from err


def _columns(schema: pa.Schema) -> list[NestedField]:
    """Return the columns as Iceberg has them, without field ids. All are optional, as older files may lack them."""
    try:
        found = _pyarrow_to_schema_without_ids(schema.remove_metadata()).fields
    except (TypeError, ValueError) as err:
        raise errors.UnsupportedSnapshot(
            f"expected columns of types that Iceberg has, found {err}: leave them out"
        ) from err
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
    ids = {name: schema.find_field(name).field_id for name in columns}
    fields = tuple(
        PartitionField(source_id=field_id, field_id=1000 + field_id, transform=IdentityTransform(), name=name)
        for name, field_id in ids.items()
    )
    same = (spec for spec in metadata.partition_specs if spec.fields == fields)
    return next(same, PartitionSpec(*fields, spec_id=max(spec.spec_id for spec in metadata.partition_specs) + 1))


def _layout_updates(metadata: TableMetadata, version: ExternalVersion) -> Iterator[update.TableUpdate]:
    schema = _schema(metadata, version.schema)
    spec = _spec(metadata, schema, version.partition_columns)
    if schema not in metadata.schemas:
        yield update.AddSchemaUpdate(schema=schema)
    yield update.SetCurrentSchemaUpdate.model_validate({"schema-id": schema.schema_id})
    if spec not in metadata.partition_specs:
        yield update.AddPartitionSpecUpdate(spec=spec)
    yield update.SetDefaultSpecUpdate.model_validate({"spec-id": spec.spec_id})


class _VersionSnapshot(_OverwriteFiles):
    """The snapshot of a version: its changes since the head of `branch`, or all of it for a new branch."""

    def __init__(self, transaction: Transaction, table: Table, version: ExternalVersion, branch: str) -> None:
        super().__init__(Operation.OVERWRITE, transaction, table.io, branch=branch)
        self._snapshot_id = version.number
        head = self._parent_snapshot_id
        before = {} if head is None else {file.path: file for file in live_files(table, head)}
        deletes = Deletes(table, table.schema())
        dead = {path: deletes.positions(file) for path, file in before.items()}
        files = {file.path: file for file in version.files}
        # a file with rows that live again counts as removed and added
        kept = {path for path in before.keys() & files.keys() if files[path].continues(before[path].bytes, dead[path])}
        died_before = {path: len(dead[path]) for path in kept}
        self._died = [each for each in version.files if len(each.dead) > died_before.get(each.path, 0)]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
            added = [file for file in version.files if file.path not in kept]
            for file, rows in zip(added, pool.map(partial(ExternalFile.count_rows, io=table.io), added), strict=True):
                self.append_data_file(_data_file(file.path, file.partition, record_count=rows, size=file.bytes))
        for path in before.keys() - kept:
            self.delete_data_file(manifest.DataFile.from_args(file_path=path))
        self._rewrites = version.only_rewrites

    def _summary(self, snapshot_properties: dict[str, str] = EMPTY_DICT) -> Summary:
        if not self._deleted_data_files and not self._died:
            return Summary(Operation.APPEND)
        if self._rewrites:
            return Summary(Operation.REPLACE)
        return Summary(Operation.OVERWRITE if self._added_data_files else Operation.DELETE)

    def _build_delete_files_partition_predicate(self) -> None:
        """Read all manifests if files are removed. pyiceberg builds no predicate of some partition values, such as NaN."""

    def _build_manifest_evaluator(self, spec_id: int) -> Callable[[manifest.ManifestFile], bool]:
        return lambda _: bool(self._deleted_data_files)

    def _process_manifests(self, manifests: list[manifest.ManifestFile]) -> list[manifest.ManifestFile]:
        """Add the manifest of one positional delete file for each partition with rows that died."""
        by_partition: dict[tuple[Any, ...], list[ExternalFile]] = defaultdict(list)
        for file in sorted(self._died, key=lambda file: file.path):
            by_partition[file.partition].append(file)
        if not by_partition:
            return manifests
        written = [self._delete_file(partition, files) for partition, files in by_partition.items()]
        writer = self.new_manifest_writer(self._transaction.table_metadata.spec())
        writer.kind = manifest.ManifestContent.DELETES
        with writer:
            for each in written:
                writer.add(manifest.ManifestEntry.from_args(status=manifest.ManifestEntryStatus.ADDED, data_file=each))
        return [*manifests, writer.to_manifest_file()]

    def _delete_file(self, partition: tuple[Any, ...], files: Sequence[ExternalFile]) -> manifest.DataFile:
        paths = np.repeat([file.path for file in files], [len(file.dead) for file in files])
        rows = pa.table([pa.array(paths), np.concatenate([file.dead for file in files])], schema=_POSITIONS)
        places = self._transaction._table.location_provider()
        output = self._io.new_output(places.new_data_location(f"{uuid4()}.parquet"))
        with output.create() as stream:
            pq.write_table(rows, stream)
        return _data_file(
            output.location,
            partition,
            content=manifest.DataFileContent.POSITION_DELETES,
            record_count=len(rows),
            size=len(output),
            lower_bounds={PATH_FIELD_ID: files[0].path.encode()},
            upper_bounds={PATH_FIELD_ID: files[-1].path.encode()},
        )

    def new_manifest_writer(self, spec: PartitionSpec) -> "_Manifest":
        """Return the writer of a manifest. An older spec may name columns that the current schema has no longer."""
        schemas = reversed(self._transaction.table_metadata.schemas)
        schema = next(each for each in schemas if all(each.find_column_name(part.source_id) for part in spec.fields))
        return _Manifest(spec, schema, self.new_manifest_output(), self._snapshot_id, self._compression)


class _Manifest(manifest.ManifestWriterV2):
    """A manifest of data files or of delete files. pyiceberg's own writer knows data files only."""

    kind = manifest.ManifestContent.DATA

    def content(self) -> manifest.ManifestContent:
        return self.kind

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "data" if self.kind == manifest.ManifestContent.DATA else "deletes"}


def _data_file(path: str, partition: tuple[Any, ...], *, size: int, **more: Any) -> manifest.DataFile:
    return manifest.DataFile.from_args(
        **{"content": manifest.DataFileContent.DATA, **more},
        file_path=path,
        file_format=manifest.FileFormat.PARQUET,
        partition=Record(*partition),
        file_size_in_bytes=size,
    )
