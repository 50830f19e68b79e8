"""A ledger that is older than its checkpoint store: refused by name wherever it is met, and nothing is deleted."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pyarrow.fs as pafs
import pytest
import torch
import yaml
from sqlalchemy import create_engine, text

import dlac_pipeline
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.commit import coordinator
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.extensions.rebuild.rebuild import rebuild_ledger
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, LedgerOlderThanStore
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger import older_ledger
from dlac_pipeline.lakehouse.ledger.journal import Journal
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.older_ledger import check_journal, commit_marked, newer_in_store
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.lakehouse.store_files import StoreFiles
from tests.conftest import Arena, wait_until
from tests.postgres_server import needs_postgres, postgres

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec
    from tests.object_store import ObjectStore


def files_of(arena: Arena) -> set[Path]:
    """Every file of the store and of the warehouse."""
    folders = (arena.home / "checkpoints" / "r", arena.home / "warehouse")
    return {path for folder in folders for path in folder.rglob("*") if path.is_file()}


def restore_catalog(arena: Arena, backup: Path, *, how: str = "copied") -> None:
    """Put the backup into the place of the catalog: into the file, or as another file."""
    if how == "copied":
        shutil.copy(backup, arena.home / "catalog.db")
    else:
        Path(shutil.copy(backup, arena.home / "moved.db")).rename(arena.home / "catalog.db")


def reconnect(arena: Arena) -> None:
    """Open the lakehouse as a new process does."""
    arena.lakehouse = connect(arena.config.at_home(arena.home))


def in_new_process(arena: Arena, work: Callable[[], object]) -> None:
    """Open the lakehouse, then work with it."""
    reconnect(arena)
    work()


def rolled_back(arena: Arena, *, backup_at: int, until: int, **settings: Any) -> JobSpec:
    """A run whose catalog was backed up when it had died in step `backup_at`, and restored when it had in step `until`."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1, **settings)
    if backup_at:
        arena.train(spec, until=backup_at)
    backup = Path(shutil.copy(arena.home / "catalog.db", arena.home / "backup.db"))
    arena.train(spec, until=until)
    restore_catalog(arena, backup)
    return spec


def check_refused(arena: Arena, spec: JobSpec) -> None:
    """Everything that reads or writes the run is refused by name, and every file stays."""
    before = files_of(arena)
    for refused in (
        lambda: arena.train(spec),
        lambda: run_status(arena.lakehouse, "r"),
        lambda: audit_run(arena.lakehouse, "r"),
        lambda: rewind_run(arena.lakehouse, "r", nonce="n", step=10),
        lambda: run_upkeep(arena.lakehouse),
    ):
        with pytest.raises(LedgerOlderThanStore, match=r"nothing was deleted: stop all launches.*dlac ledger rebuild"):
            in_new_process(arena, refused)
    assert before <= files_of(arena)


@pytest.mark.parametrize(
    ("every", "until"),
    [
        pytest.param(5, 32, id="many", marks=pytest.mark.soak),
        pytest.param(1, 40, id="metadata gone", marks=pytest.mark.soak),
        pytest.param(10, 23, id="one"),
    ],
)
def test_older_ledger_is_refused(arena: Arena, every: int, until: int) -> None:
    """Training, status, audit, rewind and upkeep: after any number of commits, also if the catalog's own files are gone."""
    spec = rolled_back(arena, backup_at=15, until=until, every_steps=every)
    check_refused(arena, spec)


def test_one_commit_is_missed(arena: Arena) -> None:
    """If a catalog lacks only the last commit of a live attempt, the mark in the store reveals it."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1)
    (arena.home / "r.yaml").write_text(yaml.safe_dump(spec.model_dump()))
    arena.monkeypatch.setenv("DLAC_HOME", str(arena.home))
    with suppress(RuntimeError), dlac_pipeline.training_run(arena.home / "r.yaml") as run:
        run.restore(dlac_pipeline.TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            if batch.step == 20:
                backup = shutil.copy(arena.home / "catalog.db", arena.home / "backup.db")
            if batch.step == 21:
                raise RuntimeError("killed")
            run.step_done(0.0)
    restore_catalog(arena, Path(backup))
    check_refused(arena, spec)


def test_restored_store_and_warehouse_work(arena: Arena) -> None:
    """A lakehouse that is restored as a whole trains on, and its audit is exact."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1)
    arena.train(spec, until=25)
    shutil.copytree(arena.home, arena.home.with_name("backup"))
    arena.train(spec, until=45)
    shutil.rmtree(arena.home)
    shutil.copytree(arena.home.with_name("backup"), arena.home)
    reconnect(arena)
    arena.train(spec)
    assert audit_run(arena.lakehouse, "r").exact
    run_upkeep(arena.lakehouse)


@pytest.mark.soak
def test_warehouse_restored_without_store(arena: Arena) -> None:
    """If catalog and warehouse come from one backup and the store is newer, the store alone reveals it."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1)
    arena.train(spec, until=15)
    shutil.copytree(arena.home / "warehouse", arena.home / "backup")
    backup = shutil.copy(arena.home / "catalog.db", arena.home / "backup.db")
    arena.train(spec, until=45)
    restore_catalog(arena, Path(backup))
    shutil.rmtree(arena.home / "warehouse")
    shutil.copytree(arena.home / "backup", arena.home / "warehouse")
    before = files_of(arena)
    reconnect(arena)
    with pytest.raises(LedgerOlderThanStore, match="newest step is 10, while step 40"):
        arena.train(spec)
    for refused in (run_status, audit_run):
        with pytest.raises(LedgerOlderThanStore, match="newest step is 10, while step 40"):
            refused(arena.lakehouse, "r")
    assert before <= files_of(arena)


@pytest.mark.soak
def test_lost_claims_are_refused(arena: Arena) -> None:
    """Nothing was committed after the backup but claims: after a rebuild the run trains on, and what was left over goes."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1)
    arena.train(spec, until=15)
    backup = shutil.copy(arena.home / "catalog.db", arena.home / "backup.db")
    for _ in range(3):
        arena.train(spec, until=18)
    restore_catalog(arena, Path(backup))
    reconnect(arena)
    with pytest.raises(LedgerOlderThanStore, match="newest step is 10, while another append was committed"):
        run_status(arena.lakehouse, "r")
    rebuild_ledger(connect(arena.config.at_home(arena.home), damaged=True))
    reconnect(arena)
    assert run_status(arena.lakehouse, "r")["step"] == 10
    arena.train(spec)
    assert audit_run(arena.lakehouse, "r").exact
    run_upkeep(arena.lakehouse)


@pytest.mark.parametrize("backup_at", [pytest.param("before the run", marks=pytest.mark.soak), "before the ledger"])
def test_forgotten_run_is_refused(arena: Arena, backup_at: str) -> None:
    """A catalog so old that it has no row of the run, or no ledger at all: a new run of this name is refused."""
    if backup_at == "before the ledger":
        shutil.rmtree(arena.home)
        arena.home.mkdir()
        empty = sqlite3.connect(arena.home / "catalog.db")
        empty.close()
        backup = shutil.copy(arena.home / "catalog.db", arena.home.with_name("backup.db"))
        arena.__post_init__()
        arena.table()
    else:
        arena.table()
        backup = shutil.copy(arena.home / "catalog.db", arena.home.with_name("backup.db"))
    spec = arena.spec("r", world_size=1, passes=1)
    arena.train(spec, until=25)
    restore_catalog(arena, Path(backup))
    before = files_of(arena)
    if backup_at == "before the ledger":
        reconnect(arena)
        arena.lakehouse.create_namespace("src")
        arena.lakehouse.catalog.register_table("src.t", newest(arena.home / "warehouse" / "src" / "t"))
    with pytest.raises(LedgerOlderThanStore, match=r"newest step is 0, while step 20|of run 'r'"):
        arena.train(spec)
    for refused in (run_status, audit_run):
        with pytest.raises(LedgerOlderThanStore):
            refused(arena.lakehouse, "r")
    assert before <= files_of(arena)


def newest(table: Path) -> str:
    """The newest metadata file of a table."""
    return max((table / "metadata").glob("*.metadata.json")).as_uri()


@pytest.mark.soak
def test_store_in_a_bucket(arena: Arena, store: ObjectStore) -> None:
    """Checkpoints in an object store: their mark and their parents are found there, and every object stays."""
    arena.table()
    places: dict[str, Any] = {"store": "s3://lake/checkpoints/", "store_properties": store.properties()}
    spec = arena.spec("r", world_size=1, passes=1, **places)
    arena.train(spec, until=15)
    lake = shutil.copytree(arena.home / "warehouse", arena.home / "lake")
    backup = shutil.copy(arena.home / "catalog.db", arena.home / "backup.db")
    arena.train(spec, until=35)
    shutil.rmtree(arena.home / "warehouse")
    lake.rename(arena.home / "warehouse")
    restore_catalog(arena, Path(backup))
    selector = pafs.FileSelector("lake/checkpoints/r", recursive=True)
    before = {info.path for info in store.files.get_file_info(selector)}
    for proof in ("the mark", "the parents"):
        if proof == "the parents":
            (mark,) = (path for path in before if "/committed-" in path)
            store.files.delete_file(mark)
            before.discard(mark)
        with pytest.raises(LedgerOlderThanStore, match="newest step is 10, while step 30"):
            arena.train(spec)
        assert {info.path for info in store.files.get_file_info(selector)} == before


@needs_postgres[0]
@needs_postgres[1]
@pytest.mark.soak
def test_postgres_restored_from_a_dump(arena: Arena) -> None:
    """The rows of a PostgreSQL catalog are put back to an older state: the same is refused."""
    with postgres() as address:
        arena.config = LakehouseConfig(uri=address)
        arena.__post_init__()
        arena.table()
        spec = arena.spec("r", world_size=1, passes=1)
        arena.train(spec, until=15)
        engine = create_engine(address)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE dump AS SELECT * FROM iceberg_tables"))
        arena.train(spec, until=35)
        with engine.begin() as connection:
            connection.execute(
                text(
                    "UPDATE iceberg_tables t SET metadata_location = d.metadata_location FROM dump d "
                    "WHERE t.table_name = d.table_name AND t.table_namespace = d.table_namespace"
                )
            )
        engine.dispose()
        check_refused(arena, spec)


def test_crash_before_commit_is_swept(arena: Arena) -> None:
    """A complete checkpoint whose commit never landed raises no alarm, and goes after the next first commit."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1)

    def die(*given: object, **how: object) -> None:
        raise KeyboardInterrupt  # between the manifest and the commit

    arena.train(spec, until=15)
    with arena.monkeypatch.context() as patched:
        patched.setattr(coordinator, "commit_checkpoint", die)
        with pytest.raises(KeyboardInterrupt):
            arena.train(spec)
    (leaf,) = (arena.home / "checkpoints" / "r").glob("attempt-0002/*/manifest.json")
    assert run_status(arena.lakehouse, "r")["step"] == 10
    arena.train(spec)
    wait_until(lambda: not leaf.exists(), what="the removal of what was never committed")
    assert audit_run(arena.lakehouse, "r").exact


@pytest.mark.parametrize(
    "name", ["r/x.parquet", "r/000000000099.parquet.tmp-1-a", "000000000099.parquet", "r/9/99.parquet"]
)
def test_stray_file_proves_nothing(arena: Arena, name: str) -> None:
    """A file in the journal that is named unlike an entry raises no alarm."""
    path = arena.home / "warehouse" / "dlac" / "consumption" / "data" / "journal" / name
    path.parent.mkdir(parents=True)
    path.write_text("")
    check_journal(arena.lakehouse)
    check_journal(arena.lakehouse, "r")


def test_damaged_entry_is_evidence(arena: Arena) -> None:
    """The name of an entry proves its append, although its rows cannot be read."""
    path = arena.home / "warehouse" / "dlac" / "consumption" / "data" / "journal" / "r" / "000000000001.parquet"
    path.parent.mkdir(parents=True)
    path.write_text("")
    with pytest.raises(
        LedgerOlderThanStore, match=r"newest step is 0, while another append was committed .*1\.parquet"
    ):
        check_journal(arena.lakehouse, "r")


@pytest.mark.parametrize(
    ("error", "found"),
    [("NETWORK_CONNECTION during ListObjectsV2", CatalogUnreachable), ("ACCESS_DENIED during ListObjectsV2", None)],
)
def test_unlisted_journal(arena: Arena, error: str, found: type[Exception] | None) -> None:
    """A store that does not answer is an outage. A journal that may not be listed is no evidence."""

    def fail(self: Journal, run: str = "") -> None:
        raise OSError(f"When listing objects: AWS Error {error}")

    arena.monkeypatch.setattr(Journal, "entries", fail)
    with nullcontext() if found is None else pytest.raises(found, match="NETWORK_CONNECTION"):
        check_journal(arena.lakehouse, "r")


def test_check_reads_no_rows(arena: Arena) -> None:
    """The check of a live run costs one listing: no entry is read, and no row of the ledger."""
    arena.table()
    arena.train(arena.spec("r", world_size=1, passes=1), until=15)
    calls: list[str] = []
    for owner, method in ((Lakehouse, "read_own"), (Journal, "read"), (Journal, "entries"), (Ledger, "rows")):
        arena.monkeypatch.setattr(owner, method, counted(getattr(owner, method), calls))
    check_journal(arena.lakehouse, "r", fill=9)
    assert calls == ["entries"]


def test_mark_without_step_counts(arena: Arena) -> None:
    """A commit mark proves its checkpoint, whatever its step is."""
    said = {"ledger_uuid": "u", "run": "r", "checkpoint_id": "c", "step": None}
    (arena.home / "committed-u.json").write_text(json.dumps(said))
    proof = commit_marked(str(arena.home), "u", StoreFiles())
    assert proof is not None
    assert (proof.checkpoint_id, proof.step) == ("c", 0)


class Store:
    """A checkpoint store in memory that records which folders are listed."""

    def __init__(self, files: dict[str, dict[str, Any]]) -> None:
        self.files = files
        self.listed: list[str] = []

    def children(self, address: str) -> list[str]:
        """Return the names in a folder."""
        self.listed.append(address)
        return sorted(
            {path.removeprefix(f"{address}/").split("/")[0] for path in self.files if path.startswith(address)}
        )

    def read(self, address: str) -> bytes:
        """Return a file."""
        if address not in self.files:
            raise FileNotFoundError(address)
        return json.dumps(self.files[address]).encode()


@pytest.mark.parametrize("lost", [False, True])
def test_old_attempts_are_not_listed(lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost checkpoints come after all known ones: a long run costs few listings, and its rows are gone through few times."""

    def folder(attempt: int, step: int) -> str:
        return f"store/r/attempt-{attempt:04}/step-{step:09}-n{attempt}/manifest.json"

    def manifest(step: int) -> dict[str, Any]:
        return {"ledger_uuid": "u", "run": "r", "parent": f"c{step - 1}", "step": step}

    rows = [
        CheckpointRow(checkpoint_id=f"c{step}", step=step, attempt=step, manifest_uri=folder(step, step))
        for step in range(1, 21)
    ]
    committed = {row.manifest_uri: manifest(row.step) for row in rows}
    left_over = {folder(20, 21 + number): manifest(21) for number in range(20)}
    store = Store({**committed, **left_over, **({folder(21, 23): manifest(23)} if lost else {})})
    passes: list[str] = []
    monkeypatch.setattr(older_ledger, "checkpoint_rows", counted(checkpoint_rows, passes))
    ledger = cast(Ledger, SimpleNamespace(table_uuid="u", rows=lambda *_, **__: rows))
    newer = newer_in_store(ledger, "r", "store/r", cast(StoreFiles, store), rows=rows)
    assert (newer is not None) == lost
    assert store.listed == ["store/r", "store/r/attempt-0020", *(["store/r/attempt-0021"] if lost else [])]
    assert len(passes) <= 2


def counted(work: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    """Return a function that does the same and records its name with each call."""

    def call(*arguments: Any, **options: Any) -> Any:
        calls.append(work.__name__)
        return work(*arguments, **options)

    return call


def test_watch_survives_unknown_errors() -> None:
    """An error of a driver or a file system does not end the watch of a live run's ledger."""
    looks = iter([RuntimeError("a driver's"), OSError("a file system's"), LedgerOlderThanStore("older")])

    def own(name: str) -> None:
        raise next(looks)

    watch = older_ledger.LedgerWatch(cast("Lakehouse", SimpleNamespace(own=own)), every_s=0.01)

    def is_reported() -> bool:
        with suppress(LedgerOlderThanStore):
            watch.check()
            return False
        return True

    wait_until(is_reported, what="the report")
