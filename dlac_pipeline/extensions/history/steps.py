"""Steps of a table's history: the changes of each snapshot, by its manifests, and the rows that live in it.

In: two snapshots of a table. Out: the steps from the first to the second, and the live rows of any data file on the way.
"""

from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from pyiceberg.manifest import ManifestContent, ManifestEntry, ManifestEntryStatus
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from dlac_pipeline.extensions.history.row_matching import Mask, Rows
from dlac_pipeline.lakehouse.errors import AppendHistoryLost
from dlac_pipeline.lakehouse.files.open_file import open_file
from dlac_pipeline.lakehouse.iceberg.columns import expect
from dlac_pipeline.lakehouse.iceberg.data_files import LiveFile, live_files, snapshot_schema
from dlac_pipeline.lakehouse.iceberg.deletes import NO_ROWS, Deletes, Ints
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of, table_name

_THREADS = 4
Place = tuple[int, str]
"""A data file as it is in one snapshot: snapshot id and path."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Changes of one snapshot, by its manifests: data files added and removed, each with its rows.

    `parent` is None where it was expired. `operation` is "gap" for the combined changes of expired snapshots.
    """

    snapshot_id: int
    parent: int | None
    operation: str
    added: Mapping[str, int]
    removed: Mapping[str, int]
    deletes_added: bool


@dataclass
class TableRows:
    """Data files and live rows of a table's snapshots, each read once."""

    table: Table
    _files: dict[int, dict[str, LiveFile]] = field(default_factory=dict)
    _deletes: dict[int, Deletes] = field(default_factory=dict)
    _dead: dict[Place, Ints] = field(default_factory=dict)

    def files(self, snapshot_id: int) -> dict[str, LiveFile]:
        """The live data files of a snapshot by path."""
        if snapshot_id not in self._files:
            self._files[snapshot_id] = {file.path: file for file in live_files(self.table, snapshot_id)}
        return self._files[snapshot_id]

    def dead(self, place: Place) -> Ints:
        """Sorted positions of the rows of a data file that are deleted in a snapshot."""
        if place not in self._dead:
            self._dead[place] = self._read_dead(place)
        return self._dead[place]

    def alive(self, place: Place) -> Mask:
        """A mask over the positions of a data file: the rows that are live in a snapshot."""
        found = np.ones(self.files(place[0])[place[1]].rows, dtype=np.bool_)
        found[self.dead(place)] = False
        return found

    def rows(self, place: Place, chosen: Mask | None = None) -> Rows:
        """Some rows of a file, or all that are live."""
        snapshot_id, path = place
        mask = self.alive(place) if chosen is None else chosen
        return Rows(self.files(snapshot_id)[path], mask, f"snapshot {snapshot_id} of {table_name(self.table)!r}")

    def _read_dead(self, place: Place) -> Ints:
        snapshot_id, path = place
        file = self.files(snapshot_id)[path]
        if not (file.positional or file.equality or file.vector):
            return NO_ROWS
        schema = snapshot_schema(self.table, snapshot_id)
        deletes = self._deletes.get(snapshot_id)
        if deletes is None:
            deletes = self._deletes[snapshot_id] = Deletes(self.table, schema)
        with expect(f"data file {path!r}"), self.table.io.new_input(path).open() as stream:
            return deletes.dead_rows(file, open_file(path, stream, schema.fields))


def steps_between(table: Table, since: int, until: int) -> list[Step]:
    """Return the snapshots after `since` up to `until`, oldest first. A "gap" comes first where some are expired.

    pyiceberg takes the parent from a snapshot whose parent expires: a missing parent may mean the table's first snapshot.
    """
    chain: list[Snapshot] = []
    at: int | None = until
    while at is not None and at != since:
        snapshot = table.snapshot_by_id(at)
        if snapshot is None:
            break
        chain.append(snapshot)
        at = snapshot.parent_snapshot_id
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="steps") as pool:
        steps = list(pool.map(lambda snapshot: _step(table, snapshot), reversed(chain)))
    if at != since:
        steps.insert(0, _gap(table, snapshot_of(table, since), chain[-1], steps[0]))
    return steps


def _entries(table: Table, snapshot: Snapshot, *, own: bool) -> list[tuple[ManifestContent, ManifestEntry]]:
    """The entries of a snapshot's manifests: the entries that the snapshot wrote (deleted ones too), or all live entries."""
    found: list[tuple[ManifestContent, ManifestEntry]] = []
    with expect(f"the manifests of snapshot {snapshot.snapshot_id} of {table_name(table)!r}", "restore them"):
        for manifest in snapshot.manifests(table.io):
            if own and manifest.added_snapshot_id != snapshot.snapshot_id:
                continue
            entries = manifest.fetch_manifest_entry(table.io, discard_deleted=not own)
            found.extend((manifest.content, entry) for entry in entries)
    return found


def _step(table: Table, snapshot: Snapshot) -> Step:
    own = snapshot.snapshot_id
    files: dict[ManifestEntryStatus, dict[str, int]] = defaultdict(dict)
    deletes_added = False
    for content, entry in _entries(table, snapshot, own=True):
        if entry.snapshot_id == own and content == ManifestContent.DATA:
            files[entry.status][entry.data_file.file_path] = entry.data_file.record_count
        elif entry.snapshot_id == own and entry.status == ManifestEntryStatus.ADDED:
            deletes_added = True
    parent = snapshot.parent_snapshot_id
    return Step(
        snapshot_id=own,
        parent=parent if parent is not None and table.snapshot_by_id(parent) is not None else None,
        operation="overwrite" if snapshot.summary is None else snapshot.summary.operation.value,
        added=files[ManifestEntryStatus.ADDED],
        removed=files[ManifestEntryStatus.DELETED],
        deletes_added=deletes_added,
    )


def _gap(table: Table, since: Snapshot, first: Snapshot, step: Step) -> Step:
    """Return the changes of the expired snapshots between `since` and `first` as one step. `step` has the changes of `first`."""
    before: dict[str, tuple[int, int | None]] = {path: (rows, None) for path, rows in step.removed.items()}
    deletes_added = False
    for content, entry in _entries(table, first, own=False):
        if entry.snapshot_id == first.snapshot_id:
            continue
        if content == ManifestContent.DATA:
            before[entry.data_file.file_path] = (entry.data_file.record_count, entry.file_sequence_number)
        else:
            deletes_added |= (entry.sequence_number or 0) > (since.sequence_number or 0)
    planned = {path: file.rows for path, file in TableRows(table).files(since.snapshot_id).items()}
    older = [path for path, (_, number) in before.items() if path not in planned and _precedes(table, number, since)]
    found = f"the older data file {older[0]!r} in it" if older else ""
    found = found or ("that it is older" if _precedes(table, first.sequence_number, since) else "")
    found = found or ("that nothing older is in it" if planned and not before else "")
    if found:
        raise AppendHistoryLost(
            f"expected snapshot {first.snapshot_id} of {table_name(table)!r} to descend from {since.snapshot_id}, up to which "
            f"was planned, found {found}: the table was rolled back or replaced; start a new run"
        )
    return Step(
        snapshot_id=first.snapshot_id,
        parent=None,
        operation="gap",
        added={path: rows for path, (rows, _) in before.items() if path not in planned},
        removed={path: rows for path, rows in planned.items() if path not in before},
        deletes_added=deletes_added,
    )


def _precedes(table: Table, sequence_number: int | None, since: Snapshot) -> bool:
    """Return True if an entry with this sequence number is not younger than `since`. Version 1 has no sequence numbers."""
    known = table.metadata.format_version > 1 and sequence_number is not None and since.sequence_number is not None
    return known and int(sequence_number or 0) <= int(since.sequence_number or 0)
