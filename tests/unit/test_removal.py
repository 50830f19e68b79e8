"""Removal of retired checkpoints: a failed removal blocks no other, is retried, and is logged once."""

import logging
import threading
from pathlib import Path

import pytest

from dlac_pipeline.checkpoint.commit import retention as retentions
from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.lakehouse.errors import StoreUnavailable
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow, RetireRow
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.spec.job_spec import CheckpointSpec


class Store:
    """The folder of a run's checkpoints 0, 1, 2 .... Some of them cannot be removed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run = folder / "r"
        self.stuck: set[int] = set()
        self.tries = 0
        remove = StoreFiles.remove

        def remove_or_fail(files: StoreFiles, address: str) -> None:
            self.tries += 1
            if int(Path(address).name.split("-")[1]) in self.stuck:
                raise StoreUnavailable("the folder is not empty")
            remove(files, address)

        monkeypatch.setattr(StoreFiles, "remove", remove_or_fail)

    def row(self, number: int) -> CheckpointRow:
        """Make a checkpoint, and return its ledger row."""
        folder = self.run / "attempt-0001" / f"step-{number:09d}-abcd"
        folder.mkdir(parents=True)
        uri = (folder / "manifest.json").as_uri()
        return CheckpointRow(checkpoint_id=str(number), step=number, manifest_uri=uri)

    def retention(self, retired: int) -> retentions.Retention:
        """Return the retention of an attempt, with earlier retired checkpoints whose folders still exist."""
        rows: list[LedgerRow] = [self.row(number) for number in range(retired)]
        rows += [RetireRow(checkpoint_id=str(number)) for number in range(retired)]
        tiers = Tiers(run="r", local=self.run.parent, store=None, files=StoreFiles(deadline_s=0.0))
        rows.append(ClaimRow(attempt=2, nonce="ef"))
        return retentions.Retention(CheckpointSpec(keep_last=1), tiers, 2, rows)

    @property
    def existing(self) -> list[int]:
        """The checkpoints whose folders exist."""
        return sorted(int(path.name.split("-")[1]) for path in self.run.glob("attempt-*/step-*"))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store."""
    return Store(tmp_path, monkeypatch)


def wait_for_removals() -> None:
    """Wait until every removal has ended."""
    for thread in threading.enumerate():
        if thread.name == "retention":
            thread.join()


def test_uncommitted_states_of_groups_are_removed(store: Store) -> None:
    """A replica group of the same attempt that died before it committed has left a folder. One with a later state may live."""
    retention = store.retention(1)
    left = [
        store.run / "attempt-0002" / f"step-{step:09d}-{name}" for step, name in ((4, "ef-0-12ab"), (5, "ef-1-12ab"))
    ]
    living = [store.run / "attempt-0002" / f"step-{step:09d}-{name}" for step, name in ((6, "ef-2-34cd"), (5, "ef"))]
    strange = store.run / "attempt-0002" / "step-000000004-ff-0-12ab"
    for folder in (*left, *living, strange):
        folder.mkdir(parents=True)
    retention.committed(store.row(5), [])
    wait_for_removals()
    assert not any(folder.exists() for folder in left)
    assert all(folder.exists() for folder in (*living, strange))


def test_failed_removal_is_retried_and_logged_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    """One warning is logged, whatever the number of later checkpoints. The same attempt removes the folder once it can."""
    caplog.set_level(logging.WARNING)
    retention = store.retention(3)
    store.stuck = {1, 3}
    head = store.row(3)
    for number in range(4, 8):
        retention.committed(head, [] if number == 4 else [str(number - 2)])
        head = store.row(number)
        wait_for_removals()
    assert store.existing == [1, 3, 6, 7]
    (record,) = caplog.records
    assert "the folder is not empty" in record.getMessage()
    store.stuck = set()
    retention.committed(head, [])
    wait_for_removals()
    assert store.existing == [6, 7]
    tries = store.tries
    retention.committed(store.row(8), [])
    wait_for_removals()
    assert store.tries == tries  # nothing is left, and left-over folders are listed once
