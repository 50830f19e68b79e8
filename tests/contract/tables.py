"""Source tables of the contract: Iceberg tables that engines change, with the ids of their live rows kept apart from DLAC."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.data_files import live_files
from tests.snapshots import DeleteFile, commit_snapshot, position_rows

MakeRows = Callable[[Sequence[int]], pa.Table]
"""Row ids -> rows, with a column row_id."""


@cache
def ids_in(path: str) -> list[int]:
    """Return the row ids of a data file, by position."""
    ids: list[int] = pq.read_table(path.removeprefix("file://"), columns=["row_id"])["row_id"].to_pylist()
    return ids


@dataclass
class SourceTable:
    """A table in a catalog. Row ids count up and are never used again."""

    lakehouse: Lakehouse
    name: str
    make_rows: MakeRows
    row_group_rows: int = 8
    ids: int = 0
    """Row ids used so far."""
    dead: set[int] = field(default_factory=set)
    merged: set[int] = field(default_factory=set)
    """Rows that a compaction has moved."""
    random: Random = field(default_factory=lambda: Random(0))

    def __post_init__(self) -> None:
        limit = {"write.parquet.row-group-limit": str(self.row_group_rows)}
        self.lakehouse.catalog.create_table(self.name, self.make_rows([0]).schema, properties=limit)

    @property
    def table(self) -> Table:
        """The current table."""
        return self.lakehouse.load(self.name)

    @property
    def snapshot_id(self) -> int:
        """The current snapshot."""
        current = self.table.current_snapshot()
        assert current is not None
        return current.snapshot_id

    @property
    def live(self) -> set[int]:
        """The rows that are live."""
        return set(range(self.ids)) - self.dead

    def append(self, rows: int) -> None:
        """Append a data file with new rows."""
        with self._repeatable_names():
            self.table.append(self.make_rows(range(self.ids, self.ids + rows)))
        self.ids += rows

    def delete(self, rows: Iterable[int]) -> None:
        """Delete as pyiceberg does: files are dropped or rewritten."""
        chosen = sorted(set(rows) & self.live)
        if chosen:
            with self._repeatable_names():
                self.table.delete(f"row_id in ({', '.join(map(str, chosen))})")
            self.dead |= set(chosen)

    def delete_positions(self, rows: Iterable[int]) -> None:
        """Delete by a positional delete file."""
        chosen = set(rows) & self.live
        dead = {path: [at for at, row in enumerate(ids_in(path)) if row in chosen] for path in self.paths()}
        if any(dead.values()):
            self._commit(Operation.DELETE, deletes=DeleteFile(rows=position_rows(dead)))
            self.dead |= chosen

    def delete_equal(self, rows: Iterable[int]) -> None:
        """Delete by an equality delete file on row_id."""
        chosen = sorted(set(rows) & self.live)
        if chosen:
            field_id = self.table.schema().find_field("row_id").field_id
            column = pa.field("row_id", pa.int64(), False, {"PARQUET:field_id": str(field_id)})
            deletes = DeleteFile(rows=pa.table([chosen], schema=pa.schema([column])), equality_ids=[field_id])
            self._commit(Operation.DELETE, deletes=deletes)
            self.dead |= set(chosen)

    def compact(self, files: Sequence[int] = ()) -> None:
        """Merge the live rows of some data files, by number (all by default), into one."""
        paths = self.paths()
        chosen = [paths[index % len(paths)] for index in files] or paths
        rows = [row for path in dict.fromkeys(chosen) for row in ids_in(path) if row not in self.dead]
        self._commit(Operation.REPLACE, removed=chosen, added=[self.make_rows(rows)] if rows else [])
        self.merged |= set(rows)

    def paths(self) -> list[str]:
        """The live data files."""
        return [file.path for file in live_files(self.table, self.snapshot_id)]

    @contextmanager
    def _repeatable_names(self) -> Iterator[None]:
        """Give files the same names in every repetition of an example, because the order of files is the order of units."""
        with patch.object(uuid, "uuid4", lambda: uuid.UUID(int=self.random.getrandbits(128), version=4)):
            yield

    def _commit(self, operation: Operation, **changes: Any) -> None:
        table = self.table
        with self._repeatable_names():
            commit_snapshot(table, operation, **changes)
