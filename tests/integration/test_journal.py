"""The ledger survives its table: the journal of its appends, and the rebuild after each loss."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.cli.main import app
from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.extensions.rebuild.damaged import connect_damaged
from dlac_pipeline.extensions.rebuild.rebuild import Rebuilt, rebuild_ledger
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.iceberg import own_rows
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.iceberg.snapshots import snapshot_of
from dlac_pipeline.lakehouse.ledger import journal as journals
from dlac_pipeline.lakehouse.ledger.journal import Journal
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from tests.conftest import Arena, wait_until
from tests.integration.test_older_ledger import files_of, reconnect, restore_catalog
from tests.seaweedfs import needs_seaweedfs
from tests.served_lakehouses import KINDS, served_lakehouse

TABLES = ("consumption", "plans", "recoveries", "slices", "work_units")
SET_BY_COMMIT = {"committed_at", "checkpoint", "reason"}
"""Columns of a checkpoint's rows that a manifest does not repeat: phases are in `checkpoint`."""


def journal_of(arena: Arena) -> Path:
    """The folder of the journal."""
    return arena.home / "warehouse" / "dlac" / "consumption" / "data" / "journal"


def rows_of(arena: Arena) -> dict[str, list[str]]:
    """All rows of DLAC's tables with all columns, sorted."""
    return {name: sorted(map(repr, arena.lakehouse.read_own(name).to_pylist())) for name in TABLES}


def forget_files() -> None:
    """Give this process the empty caches of a new one, which has read no manifest and no file."""
    own_rows.KEPT_FILES.clear()
    own_rows.KEPT_ROWS.clear()


def forget(arena: Arena) -> None:
    """Open the lakehouse as a new process does."""
    forget_files()
    reconnect(arena)


def look_anew(arena: Arena, look: Callable[[Lakehouse, str], object]) -> None:
    """Look at the run as a new process does."""
    forget_files()
    look(connect(arena.config.at_home(arena.home), create=False), "r")


def rebuild(arena: Arena, *, journal: str | None = None, dry_run: bool = False) -> Rebuilt:
    """Rebuild the ledger as a new process does, and open the lakehouse again."""
    forget_files()
    done = rebuild_ledger(connect_damaged(arena.config.at_home(arena.home)), journal=journal, dry_run=dry_run)
    if not dry_run:
        forget(arena)
    return done


def lose_table(arena: Arena) -> None:
    """The catalog has no ledger any more."""
    arena.lakehouse.catalog.drop_table("dlac.consumption")


def lose_metadata(arena: Arena) -> None:
    """The metadata file that the catalog names is gone."""
    Path(arena.lakehouse.own("consumption").metadata_location.removeprefix("file://")).unlink()


def lose_manifest(arena: Arena) -> None:
    """A manifest of the ledger is gone, and with it the files of some appends."""
    table = arena.lakehouse.own("consumption")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    Path(snapshot.manifests(table.io)[-1].manifest_path.removeprefix("file://")).unlink()


def lose_hour(arena: Arena) -> None:
    """The catalog is restored from a backup, which `train_both` made."""
    restore_catalog(arena, arena.home / "backup.db")


def lose_catalog(arena: Arena) -> None:
    """The catalog's file is gone, and a new one has the source table only."""
    place = arena.lakehouse.load("src.t").metadata_location
    (arena.home / "catalog.db").unlink()
    catalog = connect_damaged(arena.config.at_home(arena.home))
    catalog.create_namespace("src")
    catalog.catalog.register_table("src.t", place)


def lose_catalog_and_train(arena: Arena) -> None:
    """The catalog's file is gone, and a launch, which was refused, has made empty tables in a new one."""
    lose_catalog(arena)
    reconnect(arena)


LOSSES = (lose_table, lose_metadata, lose_manifest, lose_hour, lose_catalog, lose_catalog_and_train)


def train_both(arena: Arena) -> JobSpec:
    """Train a finished run, and one that stops, with a backup of the catalog in between. Return the spec of the second."""
    arena.table()
    arena.train(arena.spec("other", world_size=1, passes=1, every_steps=30))
    spec = arena.trained("r", world_size=1, passes=2, until=15)
    shutil.copy(arena.home / "catalog.db", arena.home / "backup.db")
    arena.train(spec, until=85)
    name_checkpoint(Ledger(arena.lakehouse), "r", "good", step=20)
    return spec


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A lakehouse with two runs. Each test leaves it as it was."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        arena = Arena(tmp_path_factory.mktemp("trained") / "home", monkeypatch)
        train_both(arena)
        yield arena


@pytest.mark.parametrize(
    "lose", [lose if lose is lose_table else pytest.param(lose, marks=pytest.mark.slow) for lose in LOSSES]
)
def test_ledger_is_rebuilt(trained: Arena, lose: Callable[[Arena], None]) -> None:
    """Each loss is detected. The rebuilt tables equal the lost ones row by row, a second rebuild changes nothing."""
    before, uuid, files = rows_of(trained), Ledger(trained.lakehouse).table_uuid, files_of(trained)
    lose(trained)
    lost = files - files_of(trained)
    for look in (run_status, audit_run):
        with pytest.raises(
            errors.NoSuchLakehouse if lose is lose_catalog else errors.DlacError,
            match=r"dlac (ledger rebuild|train SPEC)",
        ):
            look_anew(trained, look)
    damaged = files_of(trained)
    rehearsed = rebuild(trained, dry_run=True)
    assert files_of(trained) == damaged
    done = rebuild(trained)
    assert done.runs == rehearsed.runs
    assert sum(run.missing for run in done.runs) > 0
    assert not any(run.problem for run in done.runs)
    assert rows_of(trained) == before
    assert Ledger(trained.lakehouse).table_uuid == uuid
    assert [audit_run(trained.lakehouse, run).exact for run in ("r", "other")] == [True, True]
    assert not any(run.missing for run in rebuild(trained).runs)
    assert rows_of(trained) == before
    gone = files - lost - files_of(trained)
    assert all(path.name.endswith(".metadata.json") for path in gone), gone  # a commit removes the oldest


@pytest.mark.slow
@pytest.mark.parametrize(
    "lose",
    [lose_manifest, *(pytest.param(each, marks=pytest.mark.soak) for each in LOSSES if each is not lose_manifest)],
)
def test_rebuilt_run_resumes(arena: Arena, lose: Callable[[Arena], None]) -> None:
    """The run resumes after its last checkpoint, with the rows that it would have read, and upkeep accepts the tables."""
    spec = train_both(arena)
    expected = arena.recorded("r")
    lose(arena)
    rebuild(arena)
    run_upkeep(arena.lakehouse)
    assert min(arena.train(spec)) == 81
    assert {step: rows for step, rows in arena.recorded("r").items() if step <= 80} == expected
    assert sorted(row for rows in arena.recorded("r").values() for row in rows) == sorted(2 * list(range(2000)))
    assert audit_run(arena.lakehouse, "r").exact


@pytest.mark.soak
def test_new_catalog_with_runs(arena: Arena) -> None:
    """The catalog was lost, and another run has begun in a new one: the rebuilt ledger has both, and the older identity."""
    train_both(arena)
    before, uuid = rows_of(arena), Ledger(arena.lakehouse).table_uuid
    lose_catalog_and_train(arena)
    arena.train(arena.spec("new", world_size=1, passes=1, every_steps=30))
    added = rows_of(arena)
    rebuild(arena)
    after = rows_of(arena)
    assert all(set(after[name]) == {*before[name], *added[name]} for name in TABLES if name != "plans")
    assert len(after["plans"]) == 1  # the same plan, made again
    assert Ledger(arena.lakehouse).table_uuid == uuid
    kept = {each.table: each.busy for each in run_upkeep(arena.lakehouse)}
    assert kept == dict.fromkeys({*TABLES, *kept}, False)
    assert all(audit_run(arena.lakehouse, run).exact for run in ("r", "other", "new"))


@pytest.mark.slow
def test_new_catalog_with_more_commits(arena: Arena) -> None:
    """Tables of a new catalog, with more commits than the lost ones had, get the rows of those."""
    arena.table(appends=(640,))
    arena.train(arena.spec("r", world_size=1, passes=1, every_steps=4))
    before = rows_of(arena)
    lose_catalog_and_train(arena)
    arena.train(arena.spec("new", world_size=1, passes=1, every_steps=30))
    added = rows_of(arena)
    for name in {*TABLES} - {"consumption"}:
        for commit in range(4):
            with arena.lakehouse.own(name).transaction() as transaction:
                transaction.set_properties({"commit": str(commit)})
    rebuild(arena)
    after = rows_of(arena)
    assert all(set(after[name]) == {*before[name], *added[name]} for name in TABLES if name != "plans")
    assert not any(run.missing for run in rebuild(arena).runs)
    assert rows_of(arena) == after
    assert not any(each.busy for each in run_upkeep(arena.lakehouse))
    assert all(audit_run(arena.lakehouse, run).exact for run in ("r", "new"))


@pytest.mark.slow
def test_lost_manifest_is_reported(trained: Arena) -> None:
    """The last entries and the manifest that repeats them are gone: the run stays refused until one of both is back."""
    before = rows_of(trained)
    row = max(trained.rows("r", CheckpointRow), key=lambda each: each.seq)
    paths = [path for path in (journal_of(trained) / "r").iterdir() if int(path.stem) >= row.seq]
    kept = {path: path.read_bytes() for path in (*paths, Path(row.manifest_uri.removeprefix("file://")))}
    for path in kept:
        path.unlink()
    lose_table(trained)
    problems = {run.run: run.problem for run in rebuild(trained).runs}
    assert problems["other"] == ""
    assert "no manifest restores it" in problems["r"]
    with pytest.raises(errors.LedgerOlderThanStore, match="newest step is 70, while step 80"):
        look_anew(trained, run_status)
    for path, content in kept.items():
        path.write_bytes(content)
    assert not any(run.problem for run in rebuild(trained).runs)
    assert rows_of(trained) == before


@pytest.mark.slow
def test_gap_is_reported(trained: Arena, capsys: pytest.CaptureFixture[str]) -> None:
    """An append in the middle that neither the journal nor the store has is named. All others are rebuilt."""
    before = rows_of(trained)
    (row,) = (row for row in trained.rows("r", CheckpointRow) if row.seq == 4)
    paths = [journal_of(trained) / "r" / "000000000004.parquet", Path(row.manifest_uri.removeprefix("file://"))]
    kept = {path: path.read_bytes() for path in paths}
    for path in kept:
        path.unlink()
    lose_table(trained)
    forget_files()
    assert app(["ledger", "rebuild", "--home", str(trained.home), "--json"], standalone_mode=False) == 1
    shown = {run["run"]: run for run in json.loads(capsys.readouterr().out)["runs"]}
    assert shown["other"]["missing"] == shown["other"]["appends"] > 0
    forget(trained)
    assert shown["r"]["missing"] == shown["r"]["appends"] == len({each.seq for each in trained.rows("r")})
    assert "found none with seq [4]: restore" in shown["r"]["problem"]
    assert any("expected one append per seq from 1 to" in each for each in audit_run(trained.lakehouse, "r").problems)
    for path, content in kept.items():
        path.write_bytes(content)
    app(["ledger", "rebuild", "--home", str(trained.home)], standalone_mode=False)
    assert "complete" in capsys.readouterr().out
    forget(trained)
    assert rows_of(trained) == before


def test_damaged_table_needs_whole_journal(trained: Arena) -> None:
    """A table that has lost a manifest is not replaced by a journal that lacks rows of that manifest."""
    before = rows_of(trained)
    entry = journal_of(trained) / "other" / "000000000005.parquet"  # the end of the run, which no checkpoint repeats
    content = entry.read_bytes()
    entry.unlink()
    table = trained.lakehouse.own("consumption")
    manifests = snapshot_of(table, None).manifests(table.io)
    for manifest, files_in in zip(manifests, own_rows.manifest_files(table), strict=True):
        rows = [row for file in files_in() for row in own_rows.read_file(table, file).to_pylist()]
        if any((row["run"], row["seq"]) == ("other", 5) for row in rows):
            Path(manifest.manifest_path.removeprefix("file://")).unlink()
    damaged = files_of(trained)
    with pytest.raises(errors.LedgerError, match=r"rows of the damaged ledger in the journal .*; nothing was changed"):
        rebuild(trained)
    assert files_of(trained) == damaged
    entry.write_bytes(content)
    rebuild(trained)
    assert rows_of(trained) == before


def test_live_launch_refuses_rebuild(trained: Arena, tmp_path: Path) -> None:
    """A launch that holds the lock of its run may commit at any moment. Then a copy of the journal rebuilds the ledger, too."""
    before = rows_of(trained)
    copy = shutil.copytree(journal_of(trained), tmp_path / "copy")
    lose_hour(trained)
    local = str(trained.home / "checkpoints")
    with run_lock(local, "r", wait_s=0, takeover=False), pytest.raises(errors.RunBusy, match="nothing was changed"):
        rebuild(trained)
    rebuild(trained, journal=copy.as_uri())
    assert rows_of(trained) == before


def test_wrong_journal_is_refused(trained: Arena, tmp_path: Path) -> None:
    """An address without entries is named, and nothing is changed: neither a lost nor a whole ledger."""
    before = files_of(trained)
    for address in (str(tmp_path), str(tmp_path / "missing")):
        with pytest.raises(errors.BadInput, match=rf"expected entries .* in '{address}', found none.*--journal"):
            rebuild(trained, journal=address)
    with pytest.raises(errors.BadInput, match=r"expected entries .* found none"):
        rebuild_ledger(connect_damaged(trained.config.at_home(tmp_path)))
    assert files_of(trained) == before
    assert not rebuild(trained, dry_run=True).runs[0].missing


@pytest.mark.slow
def test_older_ledger_gets_journal(trained: Arena) -> None:
    """Upkeep writes the entries of a ledger that has none, from which the ledger is rebuilt."""
    before = rows_of(trained)
    kept = shutil.copytree(journal_of(trained), trained.home / "kept")
    shutil.rmtree(journal_of(trained))
    run_upkeep(trained.lakehouse)
    assert {path.relative_to(kept) for path in kept.rglob("*")} == {
        path.relative_to(journal_of(trained)) for path in journal_of(trained).rglob("*")
    }
    lose_table(trained)
    rebuild(trained)
    assert rows_of(trained) == before


def test_maintenance_keeps_journal(arena: Arena) -> None:
    """Retention, merges, expiry and the removal of orphans leave each entry as it is."""
    arena.table(appends=(640,))
    arena.train(arena.spec("r", world_size=1, passes=1, every_steps=2, keep_last=1))
    before = {path: path.read_bytes() for path in (journal_of(arena) / "r").iterdir()}
    done = {each.table: each for each in run_upkeep(arena.lakehouse, keep=1)}["consumption"]
    assert done.merged_files > 0
    assert done.expired_snapshots > 0
    assert done.removed_files > 0
    assert {path: path.read_bytes() for path in (journal_of(arena) / "r").iterdir()} == before
    entries = Journal.of(arena.lakehouse.own("consumption")).entries("r")
    assert entries["r"].keys() == Ledger(arena.lakehouse).appends()["r"]


def test_unwritable_journal_fails_no_commit(arena: Arena, caplog: pytest.LogCaptureFixture) -> None:
    """What the journal cannot take is logged once, and written by the next claim."""
    arena.table(appends=(640,))
    spec = arena.spec("r", world_size=1, passes=1, every_steps=2)
    arena.monkeypatch.setattr(journals, "WARNED", set())
    journal_of(arena).parent.mkdir()
    journal_of(arena).write_text("a file in the place of the folder")
    arena.train(spec, until=9)
    assert [record.message for record in caplog.records if "journal" in record.message][1:] == []
    assert "the append is committed" in caplog.text
    journal_of(arena).unlink()
    arena.train(spec, until=11)
    entries = Journal.of(arena.lakehouse.own("consumption")).entries("r")
    assert entries["r"].keys() == Ledger(arena.lakehouse).appends()["r"]
    assert audit_run(arena.lakehouse, "r").exact


@needs_seaweedfs
@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_served_ledger_is_rebuilt(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A REST catalog, or PostgreSQL, with a warehouse in an object store: a manifest list or the table is lost, and rebuilt."""
    with served_lakehouse(kind, tmp_path) as served:
        (tmp_path / "home").mkdir()
        arena = Arena(tmp_path / "home", monkeypatch, served.config, served.store)
        arena.table()
        spec = arena.trained("r", world_size=1, passes=1, until=35)
        table = arena.lakehouse.own("consumption")
        journal = Journal.of(table)
        wait_until(lambda: len(journal.entries("r")["r"]) == 4, what="the entries")
        uuid = Ledger(arena.lakehouse).table_uuid
        table.io.delete(journal.address_of(journal.entries("r")["r"][4]))
        if kind == "postgres":
            arena.lakehouse.catalog.drop_table("dlac.consumption")
        else:  # this server deletes all files of a table that is dropped
            snapshot = table.current_snapshot()
            assert snapshot is not None
            table.io.delete(snapshot.manifest_list)
        rebuild(arena)
        assert Ledger(arena.lakehouse).table_uuid == uuid
        assert audit_run(arena.lakehouse, "r").exact
        assert min(arena.train(spec)) == 31
        assert audit_run(arena.lakehouse, "r").exact
