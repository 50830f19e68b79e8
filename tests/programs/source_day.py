"""A day of a source table that other writers change: `python -m tests.programs.source_day HOME`.

An hour begins with a line on standard input. Each hour appends rows. Some hours delete rows (copy-on-write, or by a delete
file), merge all data files into one, or expire snapshots and delete their files. One JSON line per snapshot or change
records it afterwards, as evidence that is independent of DLAC.
"""

import json
import random
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.expressions import In
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CommitConflict
from dlac_pipeline.lakehouse.iceberg.connect import connect
from tests.conftest import source_rows
from tests.snapshots import DeleteFile, commit_snapshot, position_rows

SEED, HOURS = 7, 24
ROWS = 120
"""Rows that are appended in an hour, on average."""
KEPT_HOURS = 4
"""Snapshots older than this are expired."""
DELETES = (2, 3, 5, 7, 8, 10, 11, 13, 15, 18, 19, 21, 22)
COMPACTIONS = (4, 9, 14, 20, 23)
EXPIRIES = (6, 12, 17, 23)


def log_file(home: Path) -> Path:
    """Return the file of the writer's log."""
    return home / "source.jsonl"


@dataclass
class Source:
    """The table, and a log of its changes."""

    home: Path
    next_id: int = 0
    live: list[int] = field(default_factory=list)
    by_file: bool = False

    def __post_init__(self) -> None:
        self._lakehouse = connect(LakehouseConfig().at_home(self.home))

    def append(self, count: int) -> None:
        """Append a data file."""
        ids = range(self.next_id, self.next_id + count)
        rows = source_rows(self.next_id, count)
        self._commit(lambda table: table.append(rows), "append", ids)
        self.next_id += count
        self.live += ids

    def delete(self, ids: Iterable[int]) -> None:
        """Delete rows, alternately as pyiceberg does (data files are rewritten) and as others do (by a delete file)."""
        chosen = sorted(ids)
        self.by_file = not self.by_file
        how = "delete by file" if self.by_file else "delete"
        self._commit(lambda table: self._deleted(table, chosen), how, chosen)
        self.live = [each for each in self.live if each not in set(chosen)]

    def compact(self, shuffled: random.Random) -> None:
        """Merge all data files into one, in another order."""

        def merge(table: Table) -> None:
            rows = table.scan().to_arrow()
            rows = rows.take(shuffled.sample(range(len(rows)), len(rows)))
            assert sorted(rows["row_id"].to_pylist()) == sorted(self.live)
            commit_snapshot(table, Operation.REPLACE, removed=_paths(table), added=[rows])

        self._commit(merge, "compact", [])

    def expire(self, before_ms: int) -> None:
        """Expire the older snapshots without a name, and delete the files that only these had."""
        table = self._load()
        old = [one.snapshot_id for one in table.snapshots() if one.timestamp_ms < before_ms]
        named = {ref.snapshot_id for ref in table.refs().values()}
        gone = [each for each in old if each not in named]
        if gone:
            self._retrying(lambda table: table.maintenance.expire_snapshots().by_ids(gone).commit())
        table = self._load()
        reached = {Path(path.removeprefix("file://")) for path in table.inspect.all_files()["file_path"].to_pylist()}
        files = Path(table.location().removeprefix("file://")).glob("data/**/*.parquet")
        removed = [path for path in files if path not in reached]
        for path in removed:
            path.unlink()
        self._log("expire", [], expired=len(gone), kept=len(old) - len(gone), files=len(removed))

    def _deleted(self, table: Table, ids: list[int]) -> None:
        if not self.by_file:
            table.delete(In("row_id", ids))  # type: ignore[call-arg,arg-type]  # pydantic hides the real signature
            return
        dead = {}
        for path in _paths(table):
            found = pq.read_table(path.removeprefix("file://"), columns=["row_id"])["row_id"].to_numpy()
            dead[path] = np.flatnonzero(np.isin(found, ids)).tolist()
        deletes = DeleteFile(rows=position_rows({path: rows for path, rows in dead.items() if rows}))
        commit_snapshot(table, Operation.DELETE, deletes=deletes)

    def _commit(self, change: Callable[[Table], None], what: str, ids: Iterable[int]) -> None:
        before = self._load().current_snapshot()
        self._retrying(change)
        after = self._load().current_snapshot()
        assert after is not None
        assert before is None or before.snapshot_id != after.snapshot_id, what
        self._log(what, ids, snapshot_id=after.snapshot_id)

    def _retrying(self, change: Callable[[Table], Any]) -> None:
        """Repeat a change while pins of runs conflict with it."""
        for _ in range(20):
            try:
                change(self._load())
            except (CommitFailedException, CommitConflict):
                continue
            return
        raise AssertionError("others commit without a pause")

    def _load(self) -> Table:
        return self._lakehouse.load("src.t")

    def _log(self, what: str, ids: Iterable[int], **facts: Any) -> None:
        with log_file(self.home).open("a") as stream:
            stream.write(json.dumps({"what": what, "rows": list(ids), "at": time.time(), **facts}) + "\n")


def _paths(table: Table) -> list[str]:
    return [str(task.file.file_path) for task in table.scan().plan_files()]


def run_day(home: Path) -> None:
    """Run all hours of a day."""
    dice = random.Random(SEED)
    source = Source(home)
    began: list[float] = []
    for hour in range(HOURS):
        sys.stdin.readline()
        began.append(time.time())
        source.append(dice.randint(ROWS // 2, ROWS))
        if hour in DELETES:
            old, new = source.live[:-ROWS], source.live[-ROWS:]
            source.delete({*dice.sample(old, min(len(old), 10)), *dice.sample(new, 15)})
        if hour in COMPACTIONS:
            source.compact(dice)
        if hour in EXPIRIES:
            source.expire(int(began[hour - KEPT_HOURS] * 1000))
        source.append(dice.randint(1, ROWS // 2))


if __name__ == "__main__":
    run_day(Path(sys.argv[1]))
