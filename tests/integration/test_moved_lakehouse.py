"""A lakehouse that is moved or copied as a folder, and homes with odd names."""

import shutil
from pathlib import Path

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints, verify_checkpoints
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import LakehouseError
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
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
    """After `mv` the run resumes in the new place, is exact, and nothing is made in the old one. It can move again."""
    there = tmp_path / "moved"
    trained.home.rename(there)
    again = resumed(trained, there)
    report = audit_run(again.lakehouse, "r")
    assert report.exact, report.to_json()
    assert report.to_json()["rows_consumed"] == 600
    assert not trained.home.exists()
    assert all(verdict.problem is None for verdict in verify_checkpoints(again.lakehouse, "r"))
    for home in (tmp_path / "again", trained.home):
        there = there.rename(home)
        lakehouse = connect(LakehouseConfig().at_home(home))
        assert audit_run(lakehouse, "r").exact
        assert all(each.folder.startswith(home.as_uri()) for each in list_checkpoints(lakehouse, "r"))


@pytest.mark.slow
def test_copied_lakehouse_leaves_original_alone(trained: Arena, tmp_path: Path) -> None:
    """After `cp -r` both train on, and the copy, with the copied files alone, does not change the original."""
    copy = tmp_path / "copy"
    shutil.copytree(trained.home, copy, symlinks=True)
    resumed(trained, trained.home)
    before = content_of(trained.home)
    assert run_status(connect(LakehouseConfig().at_home(copy), create=False), "r")["step"] == 10
    again = resumed(trained, copy)
    assert audit_run(again.lakehouse, "r").exact
    assert content_of(trained.home) == before
    shutil.rmtree(trained.home)
    assert audit_run(again.lakehouse, "r").exact
    folders = {each.folder for each in list_checkpoints(again.lakehouse, "r")}
    assert all(folder.startswith(copy.as_uri()) for folder in folders)


def test_catalog_copied_alone_is_refused(trained: Arena, tmp_path: Path) -> None:
    """A catalog without its tables does not read the original's tables."""
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(trained.home / "catalog.db", alone)
    with pytest.raises(LakehouseError, match="whole folder"):
        connect(LakehouseConfig().at_home(alone), create=False)


@pytest.mark.slow
def test_home_with_odd_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is made in the folder itself, and nothing beside it."""
    name = "a b#c?d%20e&f=g;h'i[j]{k} ä 雪"
    arena = Arena(tmp_path / name, monkeypatch)
    arena.table(appends=(100,))
    arena.train(arena.spec("r", world_size=1, passes=1))
    assert audit_run(arena.lakehouse, "r").exact
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert {"catalog.db", "warehouse", "checkpoints"} <= {path.name for path in arena.home.iterdir()}
    assert all(verdict.problem is None for verdict in verify_checkpoints(arena.lakehouse, "r"))


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
