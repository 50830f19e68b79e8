from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable, write_deltalake

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.dagster.sensors.pending_work import due
from dlac_pipeline.extensions.dataset import open_dataset
from dlac_pipeline.extensions.history.changes import History, changes
from dlac_pipeline.lakehouse.errors import AppendHistoryLost, PinLost, TableReplaced
from dlac_pipeline.lakehouse.iceberg.sources import load_version
from dlac_pipeline.lakehouse.source_names import external_identifier
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, source_rows
from tests.extensions.formats.delta_tables import live_adds, planned_rows, set_dead_rows
from tests.object_store import ObjectStore

VECTORS = {"delta.enableDeletionVectors": "true"}


@pytest.fixture
def location(tmp_path: Path) -> Path:
    """The folder of a Delta table with version 0."""
    path = tmp_path / "events"
    write_deltalake(path, source_rows(0, 100), configuration=VECTORS)
    return path


def append(location: Path, start: int, count: int) -> None:
    """Append rows start .. start+count-1."""
    write_deltalake(location, source_rows(start, count), mode="append")


def spec_of(arena: Arena, run: str, location: Path, **changes: Any) -> JobSpec:
    """The spec of a run that follows a Delta table with one rank."""
    following = {"format": "delta", "table": str(location), "follow": "appends", "world_size": 1, "passes": 1}
    return arena.spec(run, **{**following, **changes})


def history(arena: Arena, location: Path, since: int = 0, **options: Any) -> History:
    """The changes of the table after a version."""
    table = load_version(arena.lakehouse, external_identifier("delta", str(location)))
    head = table.current_snapshot()
    assert head is not None
    return changes(table, since, head.snapshot_id, **options)


def test_resumed_run_trains_appended_versions(arena: Arena, location: Path) -> None:
    """A run dies, versions are appended and the rest compacted, and every row is trained once, as the audit finds."""
    spec = spec_of(arena, "follows", location, identity_columns=["row_id"], every_steps=2)
    arena.train(spec, until=3)
    append(location, 100, 60)
    append(location, 160, 40)
    DeltaTable(location).optimize.compact()
    append(location, 200, 24)
    DeltaTable(location).vacuum(dry_run=False)  # keeps what is younger than a week
    assert "advanced from snapshot 0 to 4" in due(arena.lakehouse, spec).reason
    arena.train(spec)
    assert arena.train(spec) == {}
    assert sorted(row for step in arena.recorded("follows").values() for row in step) == list(range(224))
    report = audit_run(arena.lakehouse, "follows")
    assert report.exact, report.problems


@pytest.mark.slow
def test_deletes_and_vectors_are_followed(arena: Arena, location: Path) -> None:
    """Rows that died since are known to be gone, by their positions."""
    load_version(arena.lakehouse, external_identifier("delta", str(location)))
    [path] = live_adds(location)
    append(location, 100, 10)
    set_dead_rows(location, {path: [3, 5]})
    found = history(arena, location)
    assert [step.operation for step in found.steps] == ["append", "delete"]
    assert [len(portion.files) for portion in found.portions] == [1]
    gone = found.gone(str(location / path))
    assert gone is not None
    assert gone.tolist() == [3, 5]


@pytest.mark.slow
def test_changes_without_identity_are_refused(arena: Arena, location: Path) -> None:
    """A delete that copies rows is an overwrite, as Iceberg sources have it. Identity columns make it a delete."""
    load_version(arena.lakehouse, external_identifier("delta", str(location)))
    DeltaTable(location).delete("row_id % 2 = 0")
    append(location, 100, 10)
    with pytest.raises(AppendHistoryLost, match="found an overwrite, snapshot 1"):
        _ = history(arena, location).portions
    found = history(arena, location, identity_columns=["row_id"])
    assert [step.operation for step in found.steps] == ["overwrite", "append"]
    assert len(found.portions) == 1


@pytest.mark.slow
def test_gap_in_log_counts_as_one_change(arena: Arena, location: Path) -> None:
    """Versions whose commits were cleaned up: appends are followed, and a compaction among them is not taken for one."""
    load_version(arena.lakehouse, external_identifier("delta", str(location)))
    append(location, 100, 10)
    append(location, 110, 10)
    DeltaTable(location).create_checkpoint()
    for version in (0, 1):
        (location / "_delta_log" / f"{version:020}.json").unlink()
    found = history(arena, location)
    assert [step.snapshot_id for step in found.steps] == [2]
    assert [len(portion.files) for portion in found.portions] == [2]


def test_vacuum_between_save_and_resume_is_named(arena: Arena, location: Path) -> None:
    """Its files are missed before a row is read, by a dataset and by a run."""
    settings: dict[str, Any] = {"table": str(location), "format": "delta", "columns": ["row_id"], "batch_size": 8}
    dataset = open_dataset(home=arena.home, key_groups=4, **settings)
    next(iter(dataset))
    state = dataset.state_dict()
    spec = spec_of(arena, "vacuumed", location, follow="pinned", every_steps=1)
    arena.train(spec, until=2)
    DeltaTable(location).delete("row_id < 10")
    DeltaTable(location).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
    with pytest.raises(PinLost, match=r"1 gone.*VACUUM.*start a new run"):
        open_dataset(home=arena.home, key_groups=4, state=state, **settings)
    with pytest.raises(PinLost, match="1 gone"):
        arena.train(spec)
    assert len(planned_rows(arena.lakehouse, location)) == 90


@pytest.mark.slow
def test_recreated_table_is_another_one(arena: Arena, location: Path) -> None:
    """A table at the same location with another id is not the planned one. A log of fewer versions is not, either."""
    spec = spec_of(arena, "first", location, every_steps=1)
    arena.train(spec, until=2)
    log = location / "_delta_log"
    for path in log.glob("*"):
        path.unlink()
    log.rmdir()
    write_deltalake(location, source_rows(0, 64))
    arena.train(spec_of(arena, "second", location))
    with pytest.raises(TableReplaced, match="dropped and created again"):
        arena.train(spec)
    append(location, 64, 8)
    assert len(planned_rows(arena.lakehouse, location)) == 72
    (log / f"{1:020}.json").unlink()
    with pytest.raises(AppendHistoryLost, match="found versions up to 0"):
        planned_rows(arena.lakehouse, location)


@pytest.mark.slow
def test_racing_processes_mirror_a_version_once(arena: Arena, location: Path) -> None:
    """Threads that mirror the same versions at the same time get the same snapshots."""
    for start in range(100, 140, 10):
        append(location, start, 10)
    identifier = external_identifier("delta", str(location))
    for numbers in ((2, 2, 2), (None, None, 1, 1, 0)):
        with ThreadPoolExecutor(len(numbers)) as threads:
            list(threads.map(partial(load_version, arena.lakehouse, identifier), numbers))
    assert sorted(each.snapshot_id for each in arena.lakehouse.load(identifier).snapshots()) == [0, 1, 2, 3, 4]
    assert [len(planned_rows(arena.lakehouse, location, version)) for version in range(5)] == [100, 110, 120, 130, 140]


@pytest.mark.slow
def test_table_in_object_store_is_read(arena: Arena, store: ObjectStore) -> None:
    """With the settings of the lakehouse's object store, and checked for files that are gone."""
    options = {"AWS_ENDPOINT_URL": store.url, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    options |= {"AWS_REGION": "us-east-1", "AWS_ALLOW_HTTP": "true", "AWS_S3_ALLOW_UNSAFE_RENAME": "true"}
    write_deltalake("s3://lake/a b", source_rows(0, 64), storage_options=options, partition_by=["name"])
    remote = store.lakehouse(arena.home / "remote")
    settings: dict[str, Any] = {"format": "delta", "table": "s3://lake/a b", "columns": ["row_id"], "batch_size": 16}
    dataset = open_dataset(lakehouse=remote, home=arena.home, **settings)
    batches = iter(dataset)
    first = next(batches)["row_id"].tolist()
    again = open_dataset(lakehouse=remote, home=arena.home, **settings, state=dataset.state_dict())
    rest = [row for batch in again for row in batch["row_id"].tolist()]
    assert sorted(first + rest) == list(range(64))
