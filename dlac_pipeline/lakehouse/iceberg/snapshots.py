"""Pin a snapshot of a source table with a tag, so that expiry cannot take it away while a run reads it."""

from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from dlac_pipeline.lakehouse.errors import CommitConflict, NoSuchSnapshot, PinLost, TableReplaced, UnsupportedSnapshot
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from dlac_pipeline.lakehouse.retrying import as_commit_conflict, retrying


def table_name(table: Table) -> str:
    """The table's name with its namespace."""
    return ".".join(table.name())


def pin_tag(snapshot_id: int) -> str:
    """The name of the tag that pins `snapshot_id`: one per snapshot, shared by all its plans."""
    return f"dlac-pin-{snapshot_id}"


def snapshot_of(table: Table, snapshot_id: int | None, *, ref: str = "") -> Snapshot:
    """The named snapshot, or the snapshot of a branch or a tag, or the current one.

    Raises `NoSuchSnapshot`, or `UnsupportedSnapshot` for an id that is no signed 64-bit number, and so cannot be recorded.
    """
    if snapshot_id is None and ref:
        if ref not in table.refs():
            raise NoSuchSnapshot(
                f"expected a branch or a tag {ref!r} in table {table_name(table)!r}, found only {sorted(table.refs())!r}: name "
                "one of these as ref"
            )
        snapshot_id = table.refs()[ref].snapshot_id
    found = table.current_snapshot() if snapshot_id is None else table.snapshot_by_id(snapshot_id)
    if found is None:
        known = sorted(snapshot.snapshot_id for snapshot in table.snapshots())
        wanted = "a current snapshot" if snapshot_id is None else f"snapshot {snapshot_id}"
        raise NoSuchSnapshot(
            f"expected {wanted} in table {table_name(table)!r}, found only {known!r}: append rows or name one of these"
        )
    if not -(2**63) <= found.snapshot_id < 2**63:
        raise UnsupportedSnapshot(
            f"expected a snapshot id of 64 bits with a sign, as Iceberg defines it, found {found.snapshot_id} in table "
            f"{table_name(table)!r}: append to the table with a writer that keeps to the format, and read the new snapshot"
        )
    return found


def schema_id_of(table: Table, snapshot: Snapshot) -> int:
    """The schema of a snapshot, whatever the table's is now. Raises `UnsupportedSnapshot` if the metadata lack it."""
    schema_id = table.metadata.current_schema_id if snapshot.schema_id is None else snapshot.schema_id
    if schema_id not in table.schemas():
        raise UnsupportedSnapshot(
            f"expected schema {schema_id} of snapshot {snapshot.snapshot_id} in the metadata of table {table_name(table)!r}, "
            f"found only schemas {sorted(table.schemas())!r}: read another snapshot"
        )
    return schema_id


def pin(lakehouse: Lakehouse, identifier: str, snapshot_id: int) -> str:
    """Tag `snapshot_id` and check afterwards that the tag exists. Return the tag's name.

    A racing expiry can silently drop a tag that was just created, and `create_tag` silently moves one that exists. Hence a
    check before and a check after. Raises `PinLost` if the tag does not stay, or names another snapshot.
    """
    tag = pin_tag(snapshot_id)

    def once() -> str:
        table = lakehouse.load(identifier)
        if is_pinned(table, identifier, snapshot_id):
            return tag
        snapshot_of(table, snapshot_id)
        with reachable(lakehouse.catalog_of(identifier)[0].config.uri), as_commit_conflict():
            table.manage_snapshots().create_tag(snapshot_id, tag).commit()
        if not is_pinned(lakehouse.load(identifier), identifier, snapshot_id):
            raise CommitConflict("it was there, and was gone at the next look, as an expiry takes it away")
        return tag

    try:
        return retrying(of=CommitConflict)(once)
    except CommitConflict as err:
        raise PinLost(
            f"tag {tag!r} of {identifier!r} does not stay: {err}; let those who write to the table finish, then plan again"
        ) from err


def is_pinned(table: Table, identifier: str, snapshot_id: int) -> bool:
    """Return True if the table has the tag that pins `snapshot_id`. Raises `PinLost` if it names another snapshot."""
    ref = table.refs().get(pin_tag(snapshot_id))
    if ref is not None and ref.snapshot_id != snapshot_id:
        raise PinLost(
            f"expected tag {pin_tag(snapshot_id)!r} of {identifier!r} to name {snapshot_id}, found {ref.snapshot_id}: "
            "another program moved it"
        )
    return ref is not None


def check_pinned(lakehouse: Lakehouse, identifier: str, *, table_uuid: str, snapshot_id: int, tag: str) -> Table:
    """The source table, after checking that it is the planned one and that its pin holds.

    Raises `TableReplaced` if the table was dropped and created again, or `PinLost`.
    """
    table = lakehouse.load(identifier)
    check_same_table(identifier, planned_uuid=table_uuid, uuid=str(table.metadata.table_uuid))
    if not tag:
        if table.snapshot_by_id(snapshot_id) is None:
            raise PinLost(
                f"expected snapshot {snapshot_id} of {identifier!r}, which no tag keeps alive, found it expired: what it held "
                'may be deleted; start a new run, and pin with a tag (pin = "tag") where the catalog allows it'
            )
        return table
    ref = table.refs().get(tag)
    if ref is None or ref.snapshot_id != snapshot_id:
        raise PinLost(
            f"expected tag {tag!r} of {identifier!r} to pin snapshot {snapshot_id}, found "
            f"{'no such tag' if ref is None else f'snapshot {ref.snapshot_id}'}: rows of this plan may be deleted already"
        )
    return table


def check_same_table(identifier: str, *, planned_uuid: str, uuid: str) -> None:
    """Raise `TableReplaced` unless the table under this name is the planned one: it was dropped and created again."""
    if uuid != planned_uuid:
        raise TableReplaced(
            f"expected table {identifier!r} to be the planned one (uuid {planned_uuid}), found uuid {uuid}: it was dropped "
            "and created again; start a new run on the new table"
        )
