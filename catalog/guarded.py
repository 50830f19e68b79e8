"""pyiceberg catalogs whose failed commits never destroy a table.

pyiceberg deletes a commit's manifests when `commit_table` raises `CommitFailedException`. If the answer of a landed commit
was lost and its request is sent again, the replay fails in exactly that way, and the manifests deleted are those of the
landed snapshot. The guard looks whether this commit's snapshot is in the table: if so, it succeeded; if not, it raises
our own `CommitConflict`, on which pyiceberg deletes nothing. Left-over files are upkeep's business. (A landed snapshot may
have been expired by the time of the look, behind many others: so whoever repeats a commit decides from the rows.)

Nor does an expiry take what it must not: pyiceberg drops a tag that was made since the expiry was decided, with its snapshot,
and fails on a snapshot that is gone already. Under the guard, both are conflicts.

Nor does one client, frozen or cut off between the two requests of its commit, stop everybody else's for good: PostgreSQL takes
the row from it, and whoever waits for a row asks again. Its error is one more doubt: it reads again, and decides from the rows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import CommitTableResponse
from pyiceberg.table.update import (
    AddSnapshotUpdate,
    RemoveSnapshotsUpdate,
    SetSnapshotRefUpdate,
    TableRequirement,
    TableUpdate,
)
from sqlalchemy import event, text

from catalog.errors import CommitConflict

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import StagedTable, Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.typedef import Identifier
    from requests import Session
    from sqlalchemy import Connection


class GuardedSqlCatalog(SqlCatalog):
    """A SQL catalog (SQLite, PostgreSQL) behind the guard; nobody has, or waits for, a table's row without an end."""

    def __init__(self, name: str, **properties: str) -> None:
        super().__init__(name, **properties)
        if self.engine.dialect.name == "postgresql":
            event.listen(self.engine, "begin", _limit_locks)

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit, or raise `CommitConflict` when the commit surely did not land."""
        try:
            response: CommitTableResponse = super().commit_table(table, requirements, updates)
        except CommitFailedException as err:
            return _landed_or_conflict(self, table, updates, err)
        except (
            FileNotFoundError
        ) as err:  # so many others committed that the metadata just looked up was replaced and removed
            raise CommitConflict(
                f"a commit to {'.'.join(table.name())!r} was overtaken, and did not land: {err}"
            ) from err
        return response

    def _update_and_stage_table(
        self,
        current_table: Table | None,
        table_identifier: Identifier,
        requirements: tuple[TableRequirement, ...],
        updates: tuple[TableUpdate, ...],
    ) -> StagedTable:
        """Look at what is expired on the very metadata that the commit replaces."""
        if current_table is not None:
            _check_expiry(current_table.metadata, updates)
        return super()._update_and_stage_table(current_table, table_identifier, requirements, updates)


class GuardedRestCatalog(RestCatalog):
    """An Iceberg REST catalog behind the guard, of which every request is answered in time or has failed."""

    def _create_session(self) -> Session:
        session = super()._create_session()
        session.request = partial(session.request, timeout=_REST_TIMEOUT_S)  # type: ignore[method-assign]
        return session

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        """Commit, or raise `CommitConflict` when the commit surely did not land."""
        try:
            response: CommitTableResponse = super().commit_table(table, requirements, updates)
        except CommitFailedException as err:
            return _landed_or_conflict(self, table, updates, err)
        return response


_REST_TIMEOUT_S = (10.0, 60.0)
"""To connect, and between two pieces of an answer."""
_POSTGRES_TIMEOUTS = {"idle_in_transaction_session_timeout": "30s", "lock_timeout": "20s"}
"""How long a client may have a row and do nothing, and wait for a row that another one has."""
_LIMIT_LOCKS = text(
    "SELECT set_config(name, CASE name WHEN 'lock_timeout' THEN :lock_timeout "
    "ELSE :idle_in_transaction_session_timeout END, true) FROM pg_settings "
    "WHERE name IN ('lock_timeout', 'idle_in_transaction_session_timeout') "
    "AND source IN ('default', 'configuration file', 'command line')"  # a day, where some services run the server
)
GUARDED: dict[str, type[MetastoreCatalog] | type[RestCatalog]] = {"sql": GuardedSqlCatalog, "rest": GuardedRestCatalog}


def _limit_locks(connection: Connection) -> None:
    """In this transaction only, for a pooler may hand the connection on; what the address, role or database says stands."""
    connection.execute(_LIMIT_LOCKS, _POSTGRES_TIMEOUTS)


def _landed_or_conflict(
    catalog: Catalog, table: Table, updates: tuple[TableUpdate, ...], err: CommitFailedException
) -> CommitTableResponse:
    current = catalog.load_table(table.name())
    mine = [update.snapshot.snapshot_id for update in updates if isinstance(update, AddSnapshotUpdate)]
    if mine and all(current.metadata.snapshot_by_id(snapshot_id) is not None for snapshot_id in mine):
        landed = {"metadata": current.metadata, "metadata-location": current.metadata_location}
        return CommitTableResponse.model_validate(landed)
    name = ".".join(table.name())
    raise CommitConflict(f"a commit to {name!r} was refused, and did not land: {err}") from err


def _check_expiry(metadata: TableMetadata, updates: tuple[TableUpdate, ...]) -> None:
    moved = {update.ref_name for update in updates if isinstance(update, SetSnapshotRefUpdate)}
    named = {ref.snapshot_id for name, ref in metadata.refs.items() if name not in moved}
    known = {snapshot.snapshot_id for snapshot in metadata.snapshots} - named
    for update in updates:
        if isinstance(update, RemoveSnapshotsUpdate) and not known.issuperset(update.snapshot_ids):
            raise CommitConflict(
                "snapshots that were to be expired are gone, or have been named by a tag: nothing landed"
            )
