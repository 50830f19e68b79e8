"""A table that is changed as engines change it, and its history, for the tests of histories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from dlac_pipeline.extensions.history.changes import History, changes
from dlac_pipeline.extensions.history.steps import TableRows
from dlac_pipeline.lakehouse.iceberg.data_files import live_files
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from tests.empty_lakehouse import empty_lakehouse
from tests.snapshots import DeleteFile, commit_snapshot, position_rows

Keyed = Literal["appends", "identity_columns"]
SCHEMA = pa.schema([("k", pa.int64()), ("name", pa.string()), ("v", pa.int64())])


@dataclass
class Lake:
    """A table of (k, name, v) and the ways in which engines change it; k is unique among its live rows."""

    home: Path
    name: str = "src.t"

    def __post_init__(self) -> None:
        self.lakehouse = empty_lakehouse(self.home)

    def create(self, name: str) -> Lake:
        """Create another table, and use it from now on."""
        self.name = name
        self.lakehouse.catalog.create_table(name, SCHEMA)
        return self

    @property
    def table(self) -> Table:
        """The table as it is now."""
        return self.lakehouse.load(self.name)

    @property
    def now(self) -> int:
        """The current snapshot's id."""
        return snapshot_of(self.table, None).snapshot_id

    def append(self, *keys: int, v: int = 0) -> int:
        """Append one data file; returns the snapshot."""
        self.table.append(rows_of(keys, v))
        return self.now

    def delete(self, *keys: int) -> int:
        """Delete as pyiceberg does: copy-on-write."""
        self.table.delete(f"k in ({', '.join(map(str, keys))})")
        return self.now

    def rewrite(
        self,
        removed: Iterable[str],
        added: Sequence[pa.Table],
        operation: str = "replace",
        dead: Mapping[str, Sequence[int]] | None = None,
    ) -> int:
        """Commit one snapshot of an `operation` that swaps data files and adds positional deletes (path -> positions)."""
        deletes = DeleteFile(rows=position_rows(dead)) if dead else None
        rows = [each for each in added if len(each)]
        commit_snapshot(self.table, Operation(operation), removed=set(removed), added=rows, deletes=deletes)
        return self.now

    def compact(self, *paths: str, operation: str = "replace") -> int:
        """Merge the live rows of some data files (all by default) into one."""
        chosen = list(paths) or self.paths()
        return self.rewrite(chosen, [pa.concat_tables([self.live(self.now, path) for path in chosen])], operation)

    def delete_rows(self, *keys: int) -> int:
        """Delete with a positional delete file."""
        dead: dict[str, list[int]] = {}
        for path in self.paths():
            found = np.flatnonzero(np.isin(read(path)["k"].to_numpy(), keys)).tolist()
            dead |= {path: found} if found else {}
        return self.rewrite([], [], "delete", dead)

    def expire(self, *snapshots: int) -> None:
        """Expire snapshots."""
        self.table.maintenance.expire_snapshots().by_ids(list(snapshots)).commit()

    def paths(self, snapshot: int | None = None) -> list[str]:
        """The live data files."""
        return [file.path for file in live_files(self.table, snapshot or self.now)]

    def live(self, snapshot: int, path: str) -> pa.Table:
        """The live rows of a file in a snapshot."""
        return read(path).filter(pa.array(TableRows(self.table).alive((snapshot, path))))

    def keys(self, snapshot: int | None = None) -> set[int]:
        """The live keys."""
        at = snapshot or self.now
        return {k for path in self.paths(at) for k in self.live(at, path)["k"].to_pylist()}

    def changes(self, since: int, keyed: Keyed = "appends", **options: Any) -> History:
        """What happened since, up to now."""
        columns = ("k",) if keyed == "identity_columns" else ()
        history = changes(self.table, since, self.now, identity_columns=columns, **options)
        assert history.portions is not None  # raises if they are lost
        return history

    def new(self, history: History) -> list[int]:
        """The keys that a run reads of the portions, in order."""
        return new_keys(self.table, history)

    def gone(self, history: History) -> set[int] | None:
        """Return the keys of `since` that are gone, or None if that is unknown for some file."""
        found: set[int] = set()
        for path in self.paths(history.since):
            positions = history.gone(path)
            if positions is None:
                return None
            found |= set(read(path)["k"].to_numpy()[positions].tolist())
        return found


def new_keys(table: Table, history: History) -> list[int]:
    """The keys that a run reads of the portions, in order."""
    rows, found = TableRows(table), list[int]()
    for portion in history.portions:
        for path in sorted(portion.files):
            alive = rows.alive((portion.snapshot_id, path))
            alive[history.old_rows(portion.snapshot_id, path)] = False
            found += read(path).filter(pa.array(alive))["k"].to_pylist()
    return found


def rows_of(keys: Iterable[int], v: int = 0) -> pa.Table:
    """Rows with these keys."""
    found = list(keys)
    return pa.table([found, [f"row {k}" for k in found], [v] * len(found)], schema=SCHEMA)


def read(path: str) -> pa.Table:
    """A data file, dead rows and all."""
    return pq.read_table(path.removeprefix("file://"))


def read_from(history: History) -> tuple[int, ...]:
    """The snapshots from which what came since is read, in order."""
    return tuple(portion.snapshot_id for portion in history.portions)
