"""Registration: an Iceberg table over Parquet files in their place, again for new files. See docs/registering.md."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from os.path import realpath

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchNamespaceError, TableAlreadyExistsError, ValidationError
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids, schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema, assign_fresh_schema_ids
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.transforms import IdentityTransform
from pyiceberg.typedef import Identifier, Record
from pyiceberg.types import LongType, NestedField

from dlac_pipeline.extensions.registration.file_metrics import describe_file
from dlac_pipeline.extensions.registration.parquet_files import (
    INTEGER,
    WILD,
    Location,
    ParquetFile,
    UnitedColumns,
    check_keys,
    unite_columns,
)
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.files.parquet import open_parquet
from dlac_pipeline.lakehouse.iceberg.columns import READ_BY_NAME, expect
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying

_log = logging.getLogger(__name__)
LOCATION = "dlac.registered-location"
_UNTIL = "dlac.registered-until"
"""Property: the newest change of a registered file. A file that is newer was changed after its registration."""
_MAPPING = "schema.name-mapping.default"
_LEFT_OUT = "dlac.left-out-columns"
"""Property: name of a column that is left out -> the reason. Later files do not add it, because older ones have other values."""
_THREADS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """Outcome of a registration."""

    table: str
    location: str
    files: int
    added_files: int
    added_rows: int
    missing: tuple[str, ...]
    """Registered files that are no longer at the location."""
    removed: tuple[str, ...]
    """Files at the location that the table itself has removed, as by a delete or a compaction. They are not added again."""
    left_out: tuple[str, ...]
    """Columns of the files that the table has not, each with the reason and a file."""
    snapshot_id: int | None
    """The newest snapshot, or None if nothing was committed."""


def register(lakehouse: Lakehouse, identifier: str, location: str, *, dry_run: bool = False) -> Registered:
    """Make the Parquet files at a location an Iceberg table, or add the new ones to it in one commit. `dry_run` commits nothing.

    Raises:
        SpecInvalid: there are no files, they belong to a table, their columns or partition keys contradict each other, or the
            table is another one.
        UnsupportedColumn: a file has no column that Iceberg can have, has a column of the table in a type that Iceberg has
            not, or is of another Iceberg table.
        DataFileChanged: a registered file has changed.
        DataFileUnreadable: a file cannot be read.
        CommitConflict: other processes commit to the table all the time.
    """
    _check_identifier(identifier)
    found = Location(location, lakehouse.config.catalog_properties())
    _check_outside_warehouse(lakehouse, found.pattern)
    found.check_plain()
    return retrying(of=errors.CommitConflict)(partial(_register, lakehouse, identifier, found, dry_run=dry_run))


def preview(config: LakehouseConfig, identifier: str, location: str) -> Registered:
    """Return the outcome of a first registration in a lakehouse that does not exist. It makes none. Raises as `register`."""
    _check_identifier(identifier)
    found = Location(location, config.catalog_properties())
    found.check_plain()
    files = found.find()
    check_keys(files, None)
    united = unite_columns(files, found.columns(files), {}, {})
    return Registered(
        table=identifier,
        location=found.pattern,
        files=len(files),
        added_files=len(files),
        added_rows=0,
        missing=(),
        removed=(),
        left_out=_described(united.left_out),
        snapshot_id=None,
    )


def _check_identifier(identifier: str) -> None:
    parts = identifier.split(".")
    if len(parts) < 2 or not all(part.strip() and part.isprintable() for part in parts):
        raise errors.SpecInvalid(
            f"expected a new table as namespace.table, found {identifier!r}: write a namespace before it, as lake.{identifier}"
        )


def registered_tables(lakehouse: Lakehouse) -> Iterator[tuple[str, str]]:
    """Yield name and location of each registered table of the catalog."""
    for namespace in _namespaces(lakehouse.catalog):
        for name in map(".".join, lakehouse.catalog.list_tables(namespace)):
            try:
                location = lakehouse.load(name).properties.get(LOCATION)
            except errors.DlacError as err:
                _log.warning("%s is not looked at, because it cannot be loaded: %s", name, err)
            else:
                yield from [] if location is None else [(name, location)]


def _namespaces(catalog: Catalog, above: Identifier = ()) -> Iterator[Identifier]:
    with suppress(NoSuchNamespaceError):
        for each in catalog.list_namespaces(above):
            if each != above:
                yield each
                yield from _namespaces(catalog, each)


def find_new_files(lakehouse: Lakehouse, identifier: str, location: str) -> list[ParquetFile]:
    """Return the files at the location of a registered table that are not registered yet. Raises as `register`."""
    table = lakehouse.load(identifier)
    files, known = Location(location, table.io.properties).find(), _data_files(table)
    _check_unchanged(table, files, known)
    seen = known.keys() | _removed_files(table)
    return [file for file in files if file.address not in seen]


def check_registered(table: Table) -> None:
    """Raise `DataFileChanged` if a registered file of a table has changed, or `DataFileUnreadable`."""
    location = table.properties.get(LOCATION)
    if location is not None:
        _check_unchanged(table, Location(location, table.io.properties).find(), _data_files(table))


def _register(lakehouse: Lakehouse, identifier: str, location: Location, *, dry_run: bool) -> Registered:
    files = location.find()
    table = _table(lakehouse, identifier, location)
    recorded = {} if table is None else _data_files(table)
    if table is not None:
        _check_unchanged(table, files, recorded)
    removed = {file.address for file in files} & (set() if table is None else _removed_files(table))
    added = [file for file in files if file.address not in recorded and file.address not in removed]
    known = {} if table is None else _columns_of(table)
    before = {} if table is None else json.loads(table.properties.get(_LEFT_OUT, "{}"))
    rows, left_out = 0, before
    if added:
        keys = None if table is None else [field.name for field in table.spec().fields]
        check_keys(added, keys)
        united = unite_columns(added, location.columns(added), known, before)
        left_out = united.left_out
        if not dry_run:
            table = table or _create(lakehouse, identifier, location, united.columns, keys=tuple(added[0].keys))
            rows = _append(lakehouse, table, added, united)
            table = lakehouse.load(identifier)
    head = None if table is None else table.current_snapshot()
    return Registered(
        table=identifier,
        location=location.pattern,
        files=len(files),
        added_files=len(added),
        added_rows=rows,
        missing=tuple(sorted(recorded.keys() - {file.address for file in files})),
        removed=tuple(sorted(removed)),
        left_out=_described(left_out),
        snapshot_id=None if head is None else head.snapshot_id,
    )


def _described(left_out: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{name!r}: {reason}" for name, reason in sorted(left_out.items()))


def _table(lakehouse: Lakehouse, identifier: str, location: Location) -> Table | None:
    try:
        table = lakehouse.load(identifier)
    except errors.NoSuchTable:
        return None
    before = table.properties.get(LOCATION)
    if before != location.pattern:
        found = "one with its own files" if before is None else f"that of {before!r}"
        raise errors.SpecInvalid(
            f"expected {identifier!r} to be a new table, or that of {location.pattern!r}, found {found}: choose another name "
            "(dlac init: --table)"
        )
    return table


def _create(
    lakehouse: Lakehouse, identifier: str, location: Location, columns: Sequence[NestedField], *, keys: Sequence[str]
) -> Table:
    schema = assign_fresh_schema_ids(Schema(*columns))
    parts = [
        PartitionField(
            source_id=schema.find_field(key).field_id, field_id=1000 + number, transform=IdentityTransform(), name=key
        )
        for number, key in enumerate(keys)
    ]
    properties = {
        LOCATION: location.pattern,
        _MAPPING: schema.name_mapping.model_dump_json(),
        "gc.enabled": "false",  # other engines would delete the files, which are not the table's
    }
    with suppress(errors.NoSuchTable):  # a name without a namespace is refused below
        lakehouse.create_namespace(identifier.rpartition(".")[0])
    with reachable(lakehouse.config.uri), suppress(TableAlreadyExistsError):
        lakehouse.catalog.create_table(identifier, schema, partition_spec=PartitionSpec(*parts), properties=properties)
    made = _table(lakehouse, identifier, location)
    assert made is not None, "just created, by this process or by another one"
    return made


def _columns_of(table: Table) -> dict[str, NestedField]:
    """Return the columns of a table without ids, by name, in order to compare them with columns of files."""
    plain = _pyarrow_to_schema_without_ids(schema_to_pyarrow(table.schema(), include_field_ids=False))
    return {field.name: field.model_copy(update={"required": False}) for field in plain.fields}


def _append(lakehouse: Lakehouse, table: Table, files: Sequence[ParquetFile], united: UnitedColumns) -> int:
    """Add files in one commit, with their new columns. Return their rows."""
    with reachable(lakehouse.config.uri), as_commit_conflict(), table.transaction() as transaction:
        try:
            with transaction.update_schema() as update:
                update.union_by_name(assign_fresh_schema_ids(Schema(*united.columns)))
        except (ValueError, TypeError, ValidationError) as err:
            raise errors.SpecInvalid(
                f"expected new files with the columns of the table, found: {err}; register them as another table"
            ) from err
        metadata = transaction.table_metadata
        schema, spec = metadata.schema(), metadata.spec()

        def describe(file: ParquetFile) -> DataFile:
            partition = Record(*(_key_value(schema, file, field.name) for field in spec.fields))
            with (
                expect(f"{file.address!r}, which was listed", "try again"),
                table.io.new_input(file.address).open() as stream,
                open_parquet(stream, schema.fields) as parquet,
            ):
                return describe_file(
                    parquet, schema, address=file.address, size=file.bytes, spec_id=spec.spec_id, partition=partition
                )

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
            described = list(pool.map(describe, files))
        with transaction.update_snapshot().fast_append() as append:
            for made in described:
                append.append_data_file(made)
        properties = {
            _UNTIL: max([metadata.properties.get(_UNTIL, ""), *map(_time, files)]),
            _LEFT_OUT: json.dumps(united.left_out),
        }
        transaction.set_properties(properties | ({READ_BY_NAME: "true"} if united.with_ids else {}))
    return sum(made.record_count for made in described)


def _key_value(schema: Schema, file: ParquetFile, key: str) -> object:
    """Return a file's value of a partition key, in the type of its column."""
    value = file.keys[key]
    if value is None or not isinstance(schema.find_field(key).field_type, LongType):
        return value
    if not INTEGER.fullmatch(value):
        raise errors.SpecInvalid(
            f"expected an integer for partition key {key!r}, as in all files before, found {value!r} in {file.address!r}: "
            "rename the folder, or register the files as a new table"
        )
    return int(value)


def _data_files(table: Table, snapshot: Snapshot | None = None) -> dict[str, DataFile]:
    """Return address -> live data file of a snapshot, by default the newest one, as the manifests have it."""
    head = snapshot or table.current_snapshot()
    manifests = [] if head is None else head.manifests(table.io)
    entries = (entry for manifest in manifests for entry in manifest.fetch_manifest_entry(table.io))
    return {entry.data_file.file_path: entry.data_file for entry in entries}


def _removed_files(table: Table) -> set[str]:
    """Return the addresses of files that retained snapshots have removed from a table, and that it has not got back."""
    removed: set[str] = set()
    for each in table.snapshots():
        parent = None if each.parent_snapshot_id is None else table.snapshot_by_id(each.parent_snapshot_id)
        if parent is not None and each.summary is not None and each.summary.operation is not Operation.APPEND:
            removed |= _data_files(table, parent).keys() - _data_files(table, each).keys()
    return removed - _data_files(table).keys()


def _check_outside_warehouse(lakehouse: Lakehouse, pattern: str) -> None:
    """Raise `SpecInvalid` for a location in the warehouse or around it, where maintenance deletes files."""
    folders = [_folder(pattern), _folder(lakehouse.config.warehouse)]
    if all(folders) and any(one.startswith(other) for one, other in (folders, folders[::-1])):
        raise errors.SpecInvalid(
            f"expected files outside of the warehouse {lakehouse.config.warehouse!r}, found {pattern!r}: maintenance deletes "
            "files there; move them, or register a narrower location"
        )


def _folder(address: str) -> str:
    """Return the folder of an address before its first wildcard, in a form that can be compared. Empty: none is known."""
    folder = address if not WILD.search(address) else WILD.split(address)[0].rpartition("/")[0]
    if not folder:
        return ""
    local = folder.removeprefix("file://")
    return f"{realpath(local) if local.startswith('/') else folder.rstrip('/')}/"


def _check_unchanged(table: Table, files: Sequence[ParquetFile], known: Mapping[str, DataFile]) -> None:
    """Raise `DataFileChanged` if a registered file has another size, or is newer, than was recorded."""
    until = table.properties.get(_UNTIL, "")
    for file in files:
        recorded = known.get(file.address)
        if recorded is None or (file.bytes == recorded.file_size_in_bytes and _time(file) <= until):
            continue
        raise errors.DataFileChanged(
            f"expected the registered file {file.address!r} as it was, with {recorded.file_size_in_bytes} bytes and no change "
            f"after {until}, found {file.bytes} bytes, changed at {_time(file)}: restore it with its time (cp -p), "
            "and write new rows to new files"
        )


def _time(file: ParquetFile) -> str:
    """Return when the file was changed, by the clock of its store, or "" if the store does not know."""
    return "" if file.changed_at is None else file.changed_at.isoformat(timespec="microseconds")
