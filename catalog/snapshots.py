"""Pin a snapshot of a source table with a tag, so that expiry cannot take it away while a run reads it."""

from __future__ import annotations

from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from catalog.connect import Lakehouse, reachable
from catalog.errors import CommitConflict, NoSuchSnapshot, PinLost, TableReplaced


def tag_of(snapshot_id: int) -> str:
    """The name of the tag that pins `snapshot_id`: one per snapshot, shared by all its plans."""
    return f"dlac-pin-{snapshot_id}"


def snapshot_of(table: Table, snapshot_id: int | None) -> Snapshot:
    """The named snapshot, or the current one.

    Raises:
        NoSuchSnapshot: the table has no such snapshot, or none at all.
    """
    name = ".".join(table.name())
    found = table.current_snapshot() if snapshot_id is None else table.snapshot_by_id(snapshot_id)
    if found is None:
        known = sorted(snapshot.snapshot_id for snapshot in table.snapshots())
        wanted = "a current snapshot" if snapshot_id is None else f"snapshot {snapshot_id}"
        raise NoSuchSnapshot(
            f"expected {wanted} in table {name!r}, found only {known!r}: append rows or name one of these"
        )
    return found


def pin(lakehouse: Lakehouse, identifier: str, snapshot_id: int) -> str:
    """Tag `snapshot_id` and look again that the tag is there; returns the tag's name.

    A racing expiry can silently drop a tag that was just created, and `create_tag` silently moves one that exists: hence
    the look before and the look after.

    Raises:
        PinLost: the tag does not stay, or names another snapshot.
    """
    tag = tag_of(snapshot_id)
    for _ in range(5):
        table = lakehouse.load(identifier)
        ref = table.refs().get(tag)
        if ref is not None and ref.snapshot_id == snapshot_id:
            return tag
        if ref is not None:
            raise PinLost(f"expected tag {tag!r} of {identifier!r} to name {snapshot_id}, found {ref.snapshot_id}")
        snapshot_of(table, snapshot_id)
        try:
            with reachable(lakehouse.config.uri):
                table.manage_snapshots().create_tag(snapshot_id, tag).commit()
        except CommitConflict:
            continue
    raise PinLost(
        f"tag {tag!r} of {identifier!r} did not stay in 5 tries: stop the expiry that races with it, then plan again"
    )


def check_pinned(lakehouse: Lakehouse, identifier: str, *, table_uuid: str, snapshot_id: int, tag: str) -> Table:
    """The source table, after checking that it is the planned one and that its pin holds.

    Raises:
        TableReplaced: the table was dropped and created again.
        PinLost: the tag is gone or names another snapshot.
    """
    table = lakehouse.load(identifier)
    if str(table.metadata.table_uuid) != table_uuid:
        raise TableReplaced(
            f"expected table {identifier!r} to be the planned one (uuid {table_uuid}), found uuid "
            f"{table.metadata.table_uuid}: it was dropped and created again; start a new run on the new table"
        )
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
