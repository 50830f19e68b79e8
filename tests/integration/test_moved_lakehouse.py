"""A lakehouse that is moved or copied as a folder, and homes with odd names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints, verify_checkpoints
from dlac_pipeline.extensions.look.run_state import list_runs, run_status
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import LakehouseError, LedgerOlderThanStore
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claims import last_spec
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from tests.conftest import Arena


def content_of(folder: Path) -> dict[str, bytes]:
    """Path -> content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def trained(arena: Arena) -> Arena:
    """A lakehouse with an unfinished run of a few checkpoints."""
    arena.table(appends=(300, 300))
    arena.train(arena.spec("r", world_size=1, passes=1, every_steps=5), until=12)
    return arena


def resumed(arena: Arena, home: Path) -> Arena:
    """The run, trained on in the lakehouse in `home`; that as an arena."""
    there = Arena(home, arena.monkeypatch)
    there.train(there.spec("r", world_size=1, passes=1, every_steps=5))
    return there


def test_moved_lakehouse_trains_on(trained: Arena, tmp_path: Path) -> None:
    """After `mv` the run resumes in the new place, is exact, and nothing is made in the old one."""
    there = tmp_path / "moved"
    trained.home.rename(there)
    again = resumed(trained, there)
    report = audit_run(again.lakehouse, "r")
    assert report.exact, report.to_json()
    assert report.to_json()["rows_consumed"] == 600
    assert not trained.home.exists()
    assert all(verdict.problem is None for verdict in verify_checkpoints(again.lakehouse, "r"))


def test_copied_lakehouse_leaves_original_alone(trained: Arena, tmp_path: Path) -> None:
    """After `cp -r` the copy trains on with the copied files, even if the original is gone, and does not change the original."""
    before = content_of(trained.home)
    copy = tmp_path / "copy"
    shutil.copytree(trained.home, copy, symlinks=True)
    again = resumed(trained, copy)
    assert audit_run(again.lakehouse, "r").exact
    assert content_of(trained.home) == before
    shutil.rmtree(trained.home)
    assert audit_run(again.lakehouse, "r").exact
    folders = {each.folder for each in list_checkpoints(again.lakehouse, "r")}
    assert all(folder.startswith(copy.as_uri()) for folder in folders)


@pytest.mark.soak
def test_copy_recovers_in_its_own_places(arena: Arena, tmp_path: Path) -> None:
    """The job spec of the last launch is found in the copy, and names the copy's lakehouse and store."""
    arena.table(appends=(100,))
    launch = arena.launch(arena.spec("r", world_size=1, passes=1))
    assert launch.wait() == 0, launch.stderr
    copy = tmp_path / "copy"
    shutil.copytree(arena.home, copy)
    spec = last_spec(connect(LakehouseConfig().at_home(copy), create=False), "r")
    assert str(arena.home) not in spec.model_dump_json(include={"lakehouse", "checkpoint"})


@pytest.mark.soak
def test_lakehouse_moves_twice(trained: Arena, tmp_path: Path) -> None:
    """What was written between two moves is found after the second one, and after the way back."""
    first, second = tmp_path / "first", tmp_path / "first" / "deeper"
    trained.home.rename(first)
    resumed(trained, first)
    first.rename(tmp_path / "aside")
    first.mkdir()
    (tmp_path / "aside").rename(second)
    for home in (second, trained.home):
        if home != second:
            second.rename(home)
        lakehouse = connect(LakehouseConfig().at_home(home))
        assert audit_run(lakehouse, "r").exact
        assert all(each.folder.startswith(home.as_uri()) for each in list_checkpoints(lakehouse, "r"))


def test_catalog_copied_alone_is_refused(trained: Arena, tmp_path: Path) -> None:
    """A catalog without its tables does not read the original's tables."""
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(trained.home / "catalog.db", alone)
    with pytest.raises(LakehouseError, match="whole folder"):
        connect(LakehouseConfig().at_home(alone), create=False)


def test_catalog_copy_with_shared_tables_is_refused(tmp_path: Path) -> None:
    """Two catalogs on one warehouse would remove each other's files."""
    warehouse = str(tmp_path / "warehouse")
    connect(LakehouseConfig(uri=f"sqlite:///{tmp_path}/a/catalog.db", warehouse=warehouse))
    (tmp_path / "b").mkdir()
    shutil.copy(tmp_path / "a" / "catalog.db", tmp_path / "b")
    with pytest.raises(LakehouseError, match="is a copy of"):
        connect(LakehouseConfig(uri=f"sqlite:///{tmp_path}/b/catalog.db", warehouse=warehouse))


@pytest.mark.parametrize(
    "name",
    [
        "a b#c?d%20e&f=g;h'i[j]{k} ä 雪",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("a#b", "a?b", "a%20b", "a b", "ä ü 雪", "a&b=c;d'e", "%", "a[b]{c}")
        ),
    ],
)
def test_home_with_odd_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Everything is made in the folder itself, and nothing beside it."""
    arena = Arena(tmp_path / name, monkeypatch)
    arena.table(appends=(100,))
    arena.train(arena.spec("r", world_size=1, passes=1))
    assert audit_run(arena.lakehouse, "r").exact
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert {"catalog.db", "warehouse", "checkpoints"} <= {path.name for path in arena.home.iterdir()}
    assert all(verdict.problem is None for verdict in verify_checkpoints(arena.lakehouse, "r"))


@pytest.mark.soak
def test_copy_is_judged_by_itself(trained: Arena, tmp_path: Path) -> None:
    """The original trains on after `cp -r`: its newer commit mark proves nothing about the copy."""
    copy = tmp_path / "copy"
    shutil.copytree(trained.home, copy, symlinks=True)
    resumed(trained, trained.home)
    lakehouse = connect(LakehouseConfig().at_home(copy), create=False)
    assert run_status(lakehouse, "r")["step"] == 10
    resumed(trained, copy)
    assert audit_run(lakehouse, "r").exact


def test_home_moves_into_itself(arena: Arena, tmp_path: Path) -> None:
    """A job spec that was written in the new place, a folder in the old one, is not translated once more."""
    claim_launch(arena)
    deeper = arena.home / "deeper"
    arena.home.rename(tmp_path / "aside")
    arena.home.mkdir()
    (tmp_path / "aside").rename(deeper)
    for _ in range(2):
        assert rewrite_spec(deeper).checkpoint.store == str(deeper / "checkpoints")


def claim_launch(arena: Arena) -> None:
    """Claim the run as a launch does, with its folder and the job spec in it."""
    arena.table(appends=(100,))
    spec = arena.spec("r", world_size=1, passes=1)
    folder = arena.home / "checkpoints" / "r" / "launch-1"
    folder.mkdir(parents=True)
    (folder / "spec.json").write_text(spec.model_dump_json())
    start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(nonce="1", launch_folder=str(folder)))


def rewrite_spec(home: Path) -> JobSpec:
    """Write the job spec that a recovery reads, as its launch does; that spec."""
    spec = last_spec(connect(LakehouseConfig().at_home(home), create=False), "r")
    (home / "checkpoints" / "r" / "launch-1" / "spec.json").write_text(spec.model_dump_json())
    return spec


@pytest.mark.soak
def test_moved_older_catalog_is_named(trained: Arena, tmp_path: Path) -> None:
    """A backup of the catalog in a moved lakehouse is refused as older, not as a lakehouse without its tables."""
    backup = shutil.copy(trained.home / "catalog.db", tmp_path / "backup.db")
    arena = Arena(trained.home, trained.monkeypatch)
    arena.train(arena.spec("r", world_size=1, passes=1, every_steps=1))
    shutil.move(backup, trained.home / "catalog.db")
    trained.home.rename(tmp_path / "moved")
    with pytest.raises(LedgerOlderThanStore, match="older backup"):
        connect(LakehouseConfig().at_home(tmp_path / "moved"), create=False)


def test_runs_of_moved_lakehouse(arena: Arena, tmp_path: Path) -> None:
    """The list of runs finds the launch folders where they are now: the next command needs no job spec."""
    claim_launch(arena)
    arena.home.rename(tmp_path / "moved")
    (listed,) = list_runs(connect(LakehouseConfig().at_home(tmp_path / "moved"), create=False))
    assert listed["next_command"] == "dlac recover r"


def test_catalog_moves_without_tables(tmp_path: Path) -> None:
    """The catalog's file alone is moved, and the named warehouse is still where it was."""
    warehouse = str(tmp_path / "warehouse")
    connect(LakehouseConfig(uri=f"sqlite:///{tmp_path}/catalog.db", warehouse=warehouse))
    (tmp_path / "sub").mkdir()
    (tmp_path / "catalog.db").rename(tmp_path / "sub" / "catalog.db")
    lakehouse = connect(LakehouseConfig(uri=f"sqlite:///{tmp_path}/sub/catalog.db", warehouse=warehouse), create=False)
    assert lakehouse.relocation.here(f"{tmp_path}/checkpoints") == f"{tmp_path}/checkpoints"
    assert Ledger(lakehouse).runs() == []
    assert not (tmp_path / "sub" / "warehouse").exists()
    shutil.copy(tmp_path / "sub" / "catalog.db", tmp_path)
    with pytest.raises(LakehouseError, match="is a copy of"):
        connect(LakehouseConfig(uri=f"sqlite:///{tmp_path}/sub/catalog.db", warehouse=warehouse), create=False)
