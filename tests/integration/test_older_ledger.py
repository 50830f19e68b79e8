"""A ledger that is older than its checkpoint store: refused by name wherever it is met, and nothing is deleted."""

import shutil
import sqlite3
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

import dlac_pipeline
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.commit import coordinator
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, LedgerOlderThanStore
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger import older_ledger
from dlac_pipeline.lakehouse.ledger.journal import Journal
from dlac_pipeline.lakehouse.ledger.older_ledger import check_journal
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, wait_until


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


def check_refused(arena: Arena, spec: JobSpec) -> None:
    """Everything that reads or writes the run is refused by name, and every file stays."""
    before = files_of(arena)
    for refused in (
        lambda: arena.train(spec),
        lambda: run_status(arena.lakehouse, "r"),
        lambda: audit_run(arena.lakehouse, "r"),
        lambda: rewind_run(arena.lakehouse, "r", nonce="n", target=10),
        lambda: run_upkeep(arena.lakehouse),
    ):
        reconnect(arena)
        with pytest.raises(LedgerOlderThanStore, match=r"nothing was deleted: stop all launches.*dlac ledger rebuild"):
            refused()
    assert before <= files_of(arena)


def test_older_ledger_is_refused(arena: Arena) -> None:
    """Training, status, audit, rewind and upkeep of a run whose catalog was restored from a backup."""
    arena.table()
    spec = arena.trained("r", world_size=1, passes=1, until=15)
    backup = Path(shutil.copy(arena.home / "catalog.db", arena.home / "backup.db"))
    arena.train(spec, until=23)
    restore_catalog(arena, backup)
    check_refused(arena, spec)


@pytest.mark.slow
def test_one_commit_is_missed(arena: Arena) -> None:
    """If a catalog lacks only the last commit of a live attempt, the mark in the store reveals it."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1)
    with suppress(RuntimeError), arena.training_run(spec) as run:
        run.restore(dlac_pipeline.TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            if batch.step == 20:
                backup = shutil.copy(arena.home / "catalog.db", arena.home / "backup.db")
            if batch.step == 21:
                raise RuntimeError("killed")
            run.step_done(0.0)
    restore_catalog(arena, Path(backup))
    check_refused(arena, spec)


@pytest.mark.slow
def test_restored_store_and_warehouse_work(arena: Arena) -> None:
    """A lakehouse that is restored as a whole trains on, and its audit is exact."""
    arena.table()
    spec = arena.trained("r", world_size=1, passes=1, until=25)
    shutil.copytree(arena.home, arena.home.with_name("backup"))
    arena.train(spec, until=45)
    shutil.rmtree(arena.home)
    shutil.copytree(arena.home.with_name("backup"), arena.home)
    reconnect(arena)
    arena.train(spec)
    assert audit_run(arena.lakehouse, "r").exact
    run_upkeep(arena.lakehouse)


@pytest.mark.slow
def test_warehouse_restored_without_store(arena: Arena) -> None:
    """If catalog and warehouse come from one backup and the store is newer, the checkpoints in the store alone reveal it."""
    arena.table(appends=(640,))
    spec = arena.trained("r", world_size=1, passes=1, every_steps=2, until=3)
    shutil.copytree(arena.home / "warehouse", arena.home / "backup")
    backup = shutil.copy(arena.home / "catalog.db", arena.home / "backup.db")
    arena.train(spec, until=9)
    restore_catalog(arena, Path(backup))
    shutil.rmtree(arena.home / "warehouse")
    shutil.copytree(arena.home / "backup", arena.home / "warehouse")
    before = files_of(arena)
    reconnect(arena)
    with pytest.raises(LedgerOlderThanStore, match="newest step is 2, while step 8"):
        arena.train(spec)
    for refused in (run_status, audit_run):
        with pytest.raises(LedgerOlderThanStore, match="newest step is 2, while step 8"):
            refused(arena.lakehouse, "r")
    assert before <= files_of(arena)


@pytest.mark.slow
def test_forgotten_run_is_refused(arena: Arena) -> None:
    """A catalog so old that it has no ledger at all: a new run of this name is refused."""
    shutil.rmtree(arena.home)
    arena.home.mkdir()
    sqlite3.connect(arena.home / "catalog.db").close()
    backup = shutil.copy(arena.home / "catalog.db", arena.home.with_name("backup.db"))
    arena.__post_init__()
    table = arena.table()
    spec = arena.trained("r", world_size=1, passes=1, until=25)
    restore_catalog(arena, Path(backup))
    before = files_of(arena)
    reconnect(arena)
    arena.lakehouse.create_namespace("src")
    newest = max(Path(table.location().removeprefix("file://"), "metadata").glob("*.metadata.json"))
    arena.lakehouse.catalog.register_table("src.t", newest.as_uri())
    with pytest.raises(LedgerOlderThanStore, match=r"newest step is 0, while step 20|of run 'r'"):
        arena.train(spec)
    for refused in (run_status, audit_run):
        with pytest.raises(LedgerOlderThanStore):
            refused(arena.lakehouse, "r")
    assert before <= files_of(arena)


@pytest.mark.slow
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


def test_names_of_entries_are_evidence(arena: Arena) -> None:
    """A stray file in the journal proves nothing. The name of an entry proves its append, although it cannot be read."""
    journal = arena.home / "warehouse" / "dlac" / "consumption" / "data" / "journal"
    for name in ("r/x.parquet", "r/000000000099.parquet.tmp-1-a", "000000000099.parquet", "r/9/99.parquet"):
        (journal / name).parent.mkdir(parents=True, exist_ok=True)
        (journal / name).touch()
        check_journal(arena.lakehouse)
        check_journal(arena.lakehouse, "r")
    (journal / "r" / "000000000001.parquet").touch()
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
