from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, ManifestEntry
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from dlac_pipeline.extensions.history.changes import History, changes
from dlac_pipeline.lakehouse.errors import AppendHistoryLost
from tests.extensions.history.history_lake import new_keys, read_from
from tests.integration.iceberg_writer import IO, HandTable

K = NestedField(1, "k", LongType(), required=False)
SCHEMA = Schema(K)
WITH_IDS = Schema(K, NestedField(2147483540, "_row_id", LongType(), required=False))


class RewrittenTable(HandTable):
    """A table of format v3 whose files are rewritten, too."""

    def add(self, *keys: int) -> str:
        """Append a file with these keys."""
        return self.append(pa.table({"k": pa.array(keys, pa.int64())}), statistics=False)

    def rewrite(self, removed: list[str], rows: dict[int, int | None], *, kept: bool, operation: str) -> str:
        """Replace files by one with these rows (key -> row id, None for a new row); ids are written if they are `kept`."""
        path = self._path("rewritten.parquet")
        columns = {"k": pa.array(list(rows), pa.int64())}
        if kept:
            columns["_row_id"] = pa.array(list(rows.values()), pa.int64())
        arrow = schema_to_pyarrow(WITH_IDS if kept else SCHEMA)
        pq.write_table(pa.table(columns).cast(arrow), path)
        self.commit([self._data_file(path, len(rows))], 0, None, self._take(removed))
        self.snapshots[-1]["summary"] = {"operation": operation}
        return path

    def _take(self, removed: list[str]) -> list[ManifestEntry]:
        """Drop the manifests of these files (each lists one), and return their entries."""
        taken, left = [], []
        for manifest in self.manifests:
            gone = [entry for entry in manifest.fetch_manifest_entry(IO) if entry.data_file.file_path in removed]
            for entry in gone:
                file = self._data_file(entry.data_file.file_path, entry.data_file.record_count)
                numbers = dict.fromkeys(("sequence_number", "file_sequence_number"), entry.sequence_number)
                taken.append(ManifestEntry.from_args(data_file=file, **numbers))
            if not gone:
                left.append(manifest)
        self.manifests[:] = left
        return taken

    def _data_file(self, path: str, rows: int) -> DataFile:
        return self.file(path, DataFileContent.DATA, (), record_count=rows, split_offsets=None)

    def changes(self, since: int) -> History:
        """Return the history since a snapshot, identified by row ids."""
        history = changes(self.table, since, self.snapshot_id)
        assert history.identified_by == "row_ids"
        assert history.portions is not None  # raises if they are lost
        return history

    def new(self, history: History) -> list[int]:
        """The keys of the portions."""
        return new_keys(self.table, history)


@pytest.fixture
def hand(tmp_path: Path) -> RewrittenTable:
    """A table of format v3."""
    return RewrittenTable(tmp_path / "t", [SCHEMA], version=3)


def test_rows_keep_their_ids_through_a_compaction(hand: RewrittenTable) -> None:
    """Old and new rows of a compacted file are distinguished by the row ids that it keeps."""
    planned = hand.add(10, 11, 12)
    since = hand.snapshot_id
    merged = hand.rewrite([planned, hand.add(13)], {13: 3, 12: 2, 10: 0}, kept=True, operation="replace")
    hand.delete_vectors({merged: [2]})
    history = hand.changes(since)
    assert (hand.new(history), read_from(history)) == ([13], (hand.snapshot_id,))
    gone = history.gone(planned)
    assert gone is not None
    assert gone.tolist() == [0, 1]


def test_an_overwrite_that_only_deletes(hand: RewrittenTable) -> None:
    """A copy-on-write delete keeps the ids of the rows that stay; rows with new ids are what an overwrite brought."""
    planned = hand.add(10, 11)
    since = hand.snapshot_id
    rest = hand.rewrite([planned], {11: 1}, kept=True, operation="overwrite")
    history = hand.changes(since)
    gone = history.gone(planned)
    assert gone is not None
    assert (hand.new(history), gone.tolist()) == ([], [0])
    hand.rewrite([rest], {11: 1, 99: None}, kept=True, operation="overwrite")
    with pytest.raises(AppendHistoryLost, match="which brings 1 new rows"):
        hand.changes(since)
    history = changes(hand.table, since, hand.snapshot_id, on_overwrite="read")
    assert hand.new(history) == [99]


def test_a_compaction_that_loses_the_ids_is_noticed(hand: RewrittenTable) -> None:
    """Rows that get other ids in a compaction would all look new: that is an error, and no second reading."""
    planned = hand.add(10, 11)
    since = hand.snapshot_id
    hand.rewrite([planned, hand.add(12)], {10: 0, 11: 1, 12: 2}, kept=False, operation="replace")
    with pytest.raises(AppendHistoryLost, match=r"row_ids\), found 3 rows with values of their own where 1 at most"):
        hand.new(hand.changes(since))
    declared = changes(hand.table, since, hand.snapshot_id, identity_columns=["k"])
    assert (declared.identified_by, hand.new(declared)) == ("identity_columns", [12])
