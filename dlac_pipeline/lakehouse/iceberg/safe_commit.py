"""Catalogs of pyiceberg whose failed commits never destroy a table.

- pyiceberg deletes a commit's manifests when `commit_table` raises `CommitFailedException`, also for the repetition of a
  landed commit whose answer was lost. If the commit's snapshot is in the table, it succeeded. If not, the guard raises our
  own `CommitConflict`, on which pyiceberg deletes nothing. Upkeep removes left-over files. (Many later commits may have
  expired a landed snapshot by the time of the check, so a caller that repeats a commit decides from the rows.)
- pyiceberg's expiry drops a tag that was made since the expiry was decided, with its snapshot, and fails on a snapshot that
  is gone already. Under the guard, both are conflicts.
"""

import sqlite3
import struct
from collections.abc import Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

from pyiceberg.avro.decoder import BinaryDecoder
from pyiceberg.avro.reader import DoubleReader
from pyiceberg.catalog import Catalog, MetastoreCatalog
from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import CommitTableResponse, StagedTable, Table
from pyiceberg.table import update as table_updates
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import TableRequirement, TableUpdate
from pyiceberg.typedef import Identifier
from sqlalchemy import Connection, Dialect, create_engine, event, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.pool import ConnectionPoolEntry, NullPool

from dlac_pipeline.lakehouse.config import sqlite_file
from dlac_pipeline.lakehouse.errors import CommitConflict
from dlac_pipeline.lakehouse.iceberg.sqlite_locks import ReportingConnection


class MetadataMissing(FileNotFoundError):
    """The metadata file at `location`, which the catalog names, is not in the warehouse."""

    def __init__(self, err: FileNotFoundError, location: str) -> None:
        super().__init__(*err.args)
        self.location = location


def decode_doubles_exactly() -> None:
    """Make pyiceberg read the doubles of manifests with all 64 bits. Repeating it changes nothing.

    pyiceberg's compiled Avro decoder returns them with 32 bits. They are partition values: files are pruned by them, columns
    that a data file lacks are filled with them, and pyiceberg writes them back when it merges manifests.
    """
    DoubleReader.read = _read_double  # type: ignore[method-assign,assignment]  # there is no hook for readers


def _read_double(_: DoubleReader, decoder: BinaryDecoder) -> float:
    return float(struct.unpack("<d", decoder.read(8))[0])


decode_doubles_exactly()


class CommitGuard(Catalog):
    """The guard of a catalog's commits, mixed into the class of any catalog."""

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit, or raise `CommitConflict` when the commit surely did not land."""
        try:
            return super().commit_table(table, requirements, updates)  # type: ignore[safe-super]  # of the class it is in
        except CommitFailedException as err:
            return _landed_or_conflict(self, table, updates, err)
        # others have committed so often that the metadata file was replaced and removed
        except FileNotFoundError as err:
            name = ".".join(table.name())
            raise CommitConflict(f"a commit to {name!r} was overtaken, and did not land: {err}") from err


class MetastoreGuard(CommitGuard, MetastoreCatalog):
    """The guard of a catalog whose clients write the metadata files: SQL, Glue, Hive."""

    def _update_and_stage_table(
        self,
        current_table: Table | None,
        table_identifier: Identifier,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> StagedTable:
        """Check the expired snapshots on the same metadata that the commit replaces."""
        if current_table is not None:
            _check_expiry(current_table.metadata, updates)
        return super()._update_and_stage_table(current_table, table_identifier, requirements, updates)


class GuardedSqlCatalog(MetastoreGuard, SqlCatalog):
    """A SQL catalog (SQLite, PostgreSQL) with the guard. A client locks, or waits for, the row of a table for a limited time."""

    def __init__(self, name: str, **properties: str) -> None:
        super().__init__(name, **properties)
        self._parsed: dict[tuple[str, ...], Table] = {}  # a metadata file never changes
        file = sqlite_file(properties["uri"])
        if file is not None:
            # A pooled connection would read and write the deleted file after a backup was moved into its place.
            self.engine.dispose()
            self.engine = create_engine(self.engine.url, poolclass=NullPool)
            event.listen(self.engine, "do_connect", partial(_connect_reporting, file))
        if self.engine.dialect.name == "postgresql":
            event.listen(self.engine, "begin", _limit_locks)
        if self.engine.dialect.name == "sqlite":
            event.listen(self.engine, "connect", _sync_commits)
            self.engine.dispose()  # the connection that made the catalog's tables

    def _convert_orm_to_iceberg(self, orm_table: IcebergTables) -> Table:
        location, name = str(orm_table.metadata_location), (orm_table.table_namespace, orm_table.table_name)
        known = self._parsed.get(name)
        if known is None or known.metadata_location != location:
            try:
                known = super()._convert_orm_to_iceberg(orm_table)
            except FileNotFoundError as err:
                raise MetadataMissing(err, location) from err
            self._parsed[name] = known
        return Table(known.name(), known.metadata, location, known.io, self)


class _TimelyRequests(CommitGuard):
    """The guard of an Iceberg REST catalog. A request that is not answered in time fails."""

    def _create_session(self) -> Any:
        session = super()._create_session()  # type: ignore[misc]  # of pyiceberg's RestCatalog
        session.request = partial(session.request, timeout=REST_TIMEOUT_S)
        return session


@cache
def guarded_catalog(name: str) -> type[Catalog]:
    """Return the guarded class of a kind of catalog, such as "rest", or of a catalog's class, such as "package.Catalog".

    Raises `ModuleNotFoundError` if a module that it needs is not installed, or `ValueError` if it is no class of a catalog.
    """
    module, _, attribute = _CLASSES.get(name, name).rpartition(".")
    found = getattr(import_module(module), attribute, None) if module else None
    if not isinstance(found, type) or not issubclass(found, Catalog):
        raise ValueError(f"expected the class of a catalog such as package.module.Catalog, found {name!r}")
    guards = {SqlCatalog: GuardedSqlCatalog, MetastoreCatalog: MetastoreGuard}
    guard = next((guard for kind, guard in guards.items() if issubclass(found, kind)), CommitGuard)
    if any(each.__module__ == "pyiceberg.catalog.rest" for each in found.__mro__):  # imported only where it is used
        guard = _TimelyRequests
    return type(f"Guarded{found.__name__}", (guard, found), {"__doc__": f"{found.__name__} with guarded commits."})


_CLASSES = {
    "sql": "pyiceberg.catalog.sql.SqlCatalog",
    "rest": "pyiceberg.catalog.rest.RestCatalog",
    "hive": "pyiceberg.catalog.hive.HiveCatalog",
    "glue": "pyiceberg.catalog.glue.GlueCatalog",
    "dynamodb": "pyiceberg.catalog.dynamodb.DynamoDbCatalog",
    "bigquery": "pyiceberg.catalog.bigquery_metastore.BigQueryMetastoreCatalog",
}
REST_TIMEOUT_S = (10.0, 60.0)
"""Seconds to connect, and between two pieces of an answer."""
POSTGRES_TIMEOUTS = {"idle_in_transaction_session_timeout": "30s", "lock_timeout": "20s"}
"""Limits for a client that holds a row and does nothing, and for the wait for a row that another client holds."""
_LIMIT_LOCKS = text(
    "SELECT set_config(name, CASE name WHEN 'lock_timeout' THEN :lock_timeout "
    "ELSE :idle_in_transaction_session_timeout END, true) FROM pg_settings "
    "WHERE name IN ('lock_timeout', 'idle_in_transaction_session_timeout') "
    "AND source IN ('default', 'configuration file', 'command line')"  # a day, where some services run the server
)


def _limit_locks(connection: Connection) -> None:
    """Set the limits in this transaction only, because a pooler may pass the connection on. Explicit settings win."""
    connection.execute(_LIMIT_LOCKS, POSTGRES_TIMEOUTS)


def _sync_commits(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    """Make SQLite sync its folder after a commit: else a power cut restores the journal, and undoes an acknowledged commit."""
    connection.cursor().execute("PRAGMA synchronous = EXTRA")


def _connect_reporting(
    file: Path, _dialect: Dialect, _entry: ConnectionPoolEntry, arguments: Sequence[str], options: dict[str, Any]
) -> ReportingConnection:
    """Open an SQLite catalog for SQLAlchemy: report a long wait for a lock, and do not make a file that is gone."""
    if not file.exists():
        raise sqlite3.OperationalError("unable to open database file: it is gone")
    return ReportingConnection(arguments[0], file=file, **options)


def _landed_or_conflict(
    catalog: Catalog, table: Table, updates: tuple[TableUpdate, ...], err: CommitFailedException
) -> CommitTableResponse:
    current = catalog.load_table(table.name())
    mine = [update.snapshot.snapshot_id for update in updates if isinstance(update, table_updates.AddSnapshotUpdate)]
    if mine and all(current.metadata.snapshot_by_id(snapshot_id) is not None for snapshot_id in mine):
        landed = {"metadata": current.metadata, "metadata-location": current.metadata_location}
        return CommitTableResponse.model_validate(landed)
    name = ".".join(table.name())
    raise CommitConflict(f"a commit to {name!r} was refused, and did not land: {err}") from err


def _check_expiry(metadata: TableMetadata, updates: tuple[TableUpdate, ...]) -> None:
    moved = {update.ref_name for update in updates if isinstance(update, table_updates.SetSnapshotRefUpdate)}
    named = {ref.snapshot_id for name, ref in metadata.refs.items() if name not in moved}
    known = {snapshot.snapshot_id for snapshot in metadata.snapshots} - named
    for update in updates:
        if isinstance(update, table_updates.RemoveSnapshotsUpdate) and not known.issuperset(update.snapshot_ids):
            raise CommitConflict(
                "snapshots that were to be expired are gone, or have been named by a tag: nothing landed"
            )
