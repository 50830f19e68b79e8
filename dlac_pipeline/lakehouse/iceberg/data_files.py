"""Live data files of a snapshot, with the deletes that apply to each, from the manifests.

pyiceberg's planner refuses equality deletes and does not read the fields of format v3, so manifests are read here, with
pyiceberg's Avro reader. A filter prunes manifests by partition summaries, and files by partition and by column metrics. The
rest that partitions leave undecided is the file's residual. Deletes are matched as the Iceberg specification defines.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from pyiceberg import manifest as manifests
from pyiceberg.avro.file import AvroFile
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestEntry, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform

from dlac_pipeline.lakehouse.errors import DataFileUnreadable, UnsupportedDeletes, UnsupportedSnapshot
from dlac_pipeline.lakehouse.files.open_file import has_installed_format
from dlac_pipeline.lakehouse.filters.conditions import ALWAYS, Condition, Constant, Known
from dlac_pipeline.lakehouse.filters.facts import UNKNOWN, Facts, both, of_counts, of_partition, of_summary
from dlac_pipeline.lakehouse.filters.literals import from_bytes
from dlac_pipeline.lakehouse.iceberg.columns import expect
from dlac_pipeline.lakehouse.iceberg.safe_commit import decode_doubles_exactly
from dlac_pipeline.lakehouse.iceberg.snapshots import schema_id_of, snapshot_of

PATH_FIELD_ID = 2147483546
ROW_ID_FIELD_ID = 2147483540
_FIRST_ROW_ID, _REFERENCED, _OFFSET, _SIZE = 16, 17, 18, 19  # places of the v3 fields in a DataFile record
_THREADS = 4
Partition = tuple[int, tuple[Any, ...]]
"""Spec id and partition values."""
decode_doubles_exactly()


@dataclass(frozen=True, kw_only=True, slots=True)
class DeleteFile:
    """A delete file. `equality_ids` are an equality delete's, `offset` and `size_bytes` a deletion vector's place in its file."""

    path: str
    rows: int
    sequence_number: int
    equality_ids: tuple[int, ...] = ()
    offset: int | None = None
    size_bytes: int | None = None
    partition_values: Mapping[int, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveFile:
    """A live data file. `residual` is the part of the filter that its partition leaves undecided.

    `snapshot_id` names the snapshot that added it. `first_row_id` is None before format v3. `partition_values` are its
    identity partition values by source field id. A deletion vector replaces positional delete files.
    """

    path: str
    spec_id: int
    rows: int
    bytes: int
    snapshot_id: int | None
    first_row_id: int | None
    residual: Condition
    positional: tuple[DeleteFile, ...] = ()
    equality: tuple[DeleteFile, ...] = ()
    vector: DeleteFile | None = None
    partition_values: Mapping[int, Any] = field(default_factory=dict)


def snapshot_schema(table: Table, snapshot_id: int) -> Schema:
    """The schema that was current when the snapshot was made. Raises `NoSuchSnapshot` if the table has no such snapshot."""
    return table.schemas()[schema_id_of(table, snapshot_of(table, snapshot_id))]


def live_files(
    table: Table, snapshot_id: int, condition: Condition = ALWAYS, *, schema: Schema | None = None
) -> list[LiveFile]:
    """The data files of a snapshot that may hold rows for which `condition` is true, sorted by path.

    `condition` is bound to `schema`: the snapshot's own unless given. Raises `NoSuchSnapshot`, `DataFileUnreadable` if a
    manifest is missing or no installed format reads a data file, `UnsupportedDeletes` for a delete file of another format, or
    `UnsupportedSnapshot` for a path that leads out of its folder.
    """
    snapshot = snapshot_of(table, snapshot_id)
    pruning = _Pruning(schema or snapshot_schema(table, snapshot_id), table.specs(), condition)
    data, deletes = [], _Deletes(table.specs(), table.metadata.format_version)
    for content, entry in _entries(table.io, snapshot.manifest_list, pruning):
        check_stays(entry.data_file.file_path, f"the manifests of {snapshot.manifest_list!r}")
        if content == ManifestContent.DELETES:
            deletes.add(entry)
        elif pruning.may_match(entry.data_file):
            data.append(entry)
    return sorted((_live_file(entry, deletes, pruning) for entry in data), key=lambda live: live.path)


def check_stays(path: str, origin: str) -> None:
    """Raise `UnsupportedSnapshot` for the path of a file with a part "..", which leads out of the folder that it names."""
    if ".." in path.split("/"):
        raise UnsupportedSnapshot(
            f"expected paths of files without '..' in {origin}, found {path!r}, which may lead to files that are not the "
            "table's: restore the table's metadata, or copy the file into the table"
        )


def _entries(io: FileIO, manifest_list: str, pruning: "_Pruning") -> Iterator[tuple[ManifestContent, ManifestEntry]]:
    """Return the live entries of all manifests that the filter leaves. Deletes are never pruned."""
    with expect(f"the manifests of {manifest_list!r}", "restore them, or plan another snapshot"):
        with AvroFile[ManifestFile](
            io.new_input(manifest_list),
            manifests.MANIFEST_LIST_FILE_SCHEMAS[3],
            read_types={-1: ManifestFile, 508: manifests.PartitionFieldSummary},
            read_enums={517: ManifestContent},
        ) as reader:
            listed = [one for one in reader if one.content == ManifestContent.DELETES or pruning.may_hold(one)]
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="manifest") as pool:
            for manifest, entries in zip(listed, pool.map(lambda one: _read(io, one), listed), strict=True):
                yield from ((manifest.content, entry) for entry in entries)


def _read(io: FileIO, manifest: ManifestFile) -> list[ManifestEntry]:
    """Return the live entries of a manifest. The n-th data file without a first row id follows those before it."""
    with AvroFile[ManifestEntry](
        io.new_input(manifest.manifest_path),
        manifests.MANIFEST_ENTRY_SCHEMAS[3],
        read_types={-1: ManifestEntry, 2: DataFile},
        read_enums={0: manifests.ManifestEntryStatus, 101: FileFormat, 134: DataFileContent},
    ) as reader:
        live = [one for one in reader if one.status != manifests.ManifestEntryStatus.DELETED]
    entries = [manifests._inherit_from_manifest(one, manifest) for one in live]
    next_row_id = manifest[15]
    for entry in entries if manifest.content == ManifestContent.DATA else ():
        file = entry.data_file
        if next_row_id is None:  # then ids that a file claims are void: the specification's rule
            file[_FIRST_ROW_ID] = None
        elif file[_FIRST_ROW_ID] is None:
            file[_FIRST_ROW_ID] = next_row_id
            next_row_id += file.record_count
    return entries


class _Pruning:
    """Pruning of manifests and files by a filter, for every partition spec that the table ever had."""

    def __init__(self, schema: Schema, specs: Mapping[int, PartitionSpec], condition: Condition) -> None:
        self.specs = specs
        self._condition = condition
        self._kinds = {path.field_id: path.kind for path in condition.paths}
        self._top_level = {found.field_id for found in schema.fields}
        self._residuals: dict[Partition, tuple[Known, Condition]] = {}

    def may_hold(self, manifest: ManifestFile) -> bool:
        known = self._known(manifest.partition_spec_id, of_summary, manifest.partitions or ())
        return self._condition.may_be_true(known)

    def may_match(self, file: DataFile) -> bool:
        known, residual = self._in_partition(file)
        if isinstance(residual, Constant):
            return residual.value
        facts = {key: both(known.get(key, UNKNOWN), self._of_metrics(file, key)) for key in self._kinds}
        return residual.may_be_true(facts)

    def residual(self, file: DataFile) -> Condition:
        """Return the part of the filter that a file's partition leaves undecided: one object for all files of a partition."""
        return self._in_partition(file)[1]

    def _in_partition(self, file: DataFile) -> tuple[Known, Condition]:
        key = _partition_of(file)
        if key not in self._residuals:
            values = [file.partition[place] for place in range(len(self.specs[file.spec_id].fields))]
            known = self._known(file.spec_id, of_partition, values)
            self._residuals[key] = known, self._condition.simplify(known)
        return self._residuals[key]

    def _known(self, spec_id: int, facts_of: Callable[..., Facts], values: Iterable[Any]) -> Known:
        known: dict[int, Facts] = {}
        for part, value in zip(self.specs[spec_id].fields, values, strict=False):
            if part.source_id in self._kinds:
                found = facts_of(part.transform, self._kinds[part.source_id], value)
                known[part.source_id] = both(known.get(part.source_id, UNKNOWN), found)
        return known

    def _of_metrics(self, file: DataFile, field_id: int) -> Facts:
        """Return facts from a file's column metrics. Writers count nulls inside of structs differently."""
        kind = self._kinds[field_id]
        if not kind.is_primitive:
            return UNKNOWN
        lower, upper = ((bounds or {}).get(field_id) for bounds in (file.lower_bounds, file.upper_bounds))
        return of_counts(
            kind,
            rows=file.record_count,
            nulls=(file.null_value_counts or {}).get(field_id) if field_id in self._top_level else None,
            nans=(file.nan_value_counts or {}).get(field_id),
            lower=None if lower is None else from_bytes(kind, lower),
            upper=None if upper is None else from_bytes(kind, upper),
        )


@dataclass
class _Deletes:
    specs: Mapping[int, PartitionSpec]
    format_version: int
    vectors: dict[str, DeleteFile] = field(default_factory=dict)
    by_path: dict[str, list[DeleteFile]] = field(default_factory=lambda: defaultdict(list))
    by_partition: dict[Partition, list[tuple[DeleteFile, DataFile]]] = field(default_factory=lambda: defaultdict(list))
    equality: dict[Partition | None, list[DeleteFile]] = field(default_factory=lambda: defaultdict(list))

    def add(self, entry: ManifestEntry) -> None:
        file, found = entry.data_file, _delete_file(entry, self.specs)
        if file.content == DataFileContent.EQUALITY_DELETES:
            unpartitioned = self.specs[file.spec_id].is_unpartitioned()
            self.equality[None if unpartitioned else _partition_of(file)].append(found)
        elif found.offset is not None:
            self._check_vector(file)
            other = self.vectors.setdefault(str(file[_REFERENCED]), found)
            if other is not found:
                raise UnsupportedDeletes(
                    f"expected one deletion vector for {str(file[_REFERENCED])!r}, found one in {other.path!r} and one in "
                    f"{found.path!r}: the table's metadata is broken; plan another snapshot"
                )
        elif (path := _only_path(file)) is not None:
            self.by_path[path].append(found)
        else:
            self.by_partition[_partition_of(file)].append((found, file))

    def _check_vector(self, file: DataFile) -> None:
        """Check that a released format of Iceberg allows a deletion vector as this one."""
        problem = ""
        if self.format_version < 3:
            problem = f"one in a table of format v{self.format_version}"
        elif file.file_format is not FileFormat.PUFFIN:
            problem = f"one in a file of format {file.file_format.value}"
        elif file[_REFERENCED] is None or file[_SIZE] is None:
            problem = "one without the data file it belongs to, or without its size"
        if problem:
            raise UnsupportedDeletes(
                f"expected deletion vectors in Puffin files of a table of format v3, found {problem}, at {file.file_path!r}: "
                "compact the table, then plan again"
            )

    def positional_of(self, file: DataFile, sequence_number: int) -> tuple[DeleteFile, ...]:
        """The positional delete files that may name rows of a data file: not older than it."""
        beside = self.by_partition.get(_partition_of(file), ())
        found = [one for one, meta in beside if _may_name(meta, file.file_path)]
        found += self.by_path.get(file.file_path, ())
        return tuple(one for one in found if one.sequence_number >= sequence_number)

    def equality_of(self, file: DataFile, sequence_number: int) -> tuple[DeleteFile, ...]:
        """The equality delete files of a data file: younger than it, global or of its partition."""
        found = [*self.equality.get(None, ()), *self.equality.get(_partition_of(file), ())]
        return tuple(one for one in found if one.sequence_number > sequence_number)


def _live_file(entry: ManifestEntry, deletes: _Deletes, pruning: _Pruning) -> LiveFile:
    file, sequence_number = entry.data_file, entry.sequence_number or 0
    if file.file_format is not FileFormat.PARQUET and not has_installed_format(file.file_path):
        raise DataFileUnreadable(
            f"expected data files in Parquet, or with the suffix of an installed format, found {file.file_format.value} at "
            f"{file.file_path!r}: rewrite the table as Parquet"
        )
    vector = deletes.vectors.get(file.file_path)
    if vector is not None and vector.sequence_number < sequence_number:
        vector = None
    return LiveFile(
        path=file.file_path,
        spec_id=file.spec_id,
        rows=file.record_count,
        bytes=file.file_size_in_bytes,
        snapshot_id=entry.snapshot_id,
        first_row_id=file[_FIRST_ROW_ID],
        residual=pruning.residual(file),
        positional=() if vector is not None else deletes.positional_of(file, sequence_number),
        equality=deletes.equality_of(file, sequence_number),
        vector=vector,
        partition_values=_identities(file, pruning.specs),
    )


def _delete_file(entry: ManifestEntry, specs: Mapping[int, PartitionSpec]) -> DeleteFile:
    file = entry.data_file
    if (
        file.file_format is not FileFormat.PARQUET
        and file[_OFFSET] is None
        and not has_installed_format(file.file_path)
    ):
        raise UnsupportedDeletes(
            f"expected deletion vectors, or delete files in Parquet or with the suffix of an installed format, found "
            f"{file.file_format.value} at {file.file_path!r}: compact the table, then plan again"
        )
    return DeleteFile(
        path=file.file_path,
        rows=file.record_count,
        sequence_number=entry.sequence_number or 0,
        equality_ids=tuple(file.equality_ids or ()),
        offset=file[_OFFSET],
        size_bytes=file[_SIZE],
        partition_values=_identities(file, specs),
    )


def _identities(file: DataFile, specs: Mapping[int, PartitionSpec]) -> Mapping[int, Any]:
    return {
        part.source_id: file.partition[place]
        for place, part in enumerate(specs[file.spec_id].fields)
        if isinstance(part.transform, IdentityTransform)
    }


def _partition_of(file: DataFile) -> Partition:
    return file.spec_id, tuple(file.partition[place] for place in range(len(file.partition)))


def _path_bounds(file: DataFile) -> tuple[str, str] | None:
    lower, upper = ((bounds or {}).get(PATH_FIELD_ID) for bounds in (file.lower_bounds, file.upper_bounds))
    return None if lower is None or upper is None else (lower.decode(), upper.decode())


def _only_path(file: DataFile) -> str | None:
    """The one data file that a positional delete file names, if its metadata say so."""
    if file[_REFERENCED] is not None:
        return str(file[_REFERENCED])
    bounds = _path_bounds(file)
    return bounds[0] if bounds is not None and bounds[0] == bounds[1] else None


def _may_name(file: DataFile, path: str) -> bool:
    bounds = _path_bounds(file)
    return bounds is None or bounds[0] <= path <= bounds[1]
