"""Each kind of damage at each place of a lakehouse: an error that names the rebuild, and a rebuild that restores or names it."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyiceberg.table import Table

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.connect import connect
from tests.conftest import Arena
from tests.integration.test_journal import (
    SET_BY_COMMIT,
    forget,
    forget_files,
    journal_of,
    lose_table,
    rebuild,
    rows_of,
    train_both,
)

NEVER = 999_999_999_999
"""Number of an entry that no append has."""


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Arena, Path]]:
    """A lakehouse with two runs, and a copy of its folder."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        arena = Arena(tmp_path_factory.mktemp("kept") / "home", monkeypatch)
        train_both(arena)
        yield arena, Path(shutil.copytree(arena.home, arena.home.with_name("intact")))


@pytest.fixture
def trained(kept: tuple[Arena, Path]) -> Arena:
    """Return the lakehouse from before any damage, at its original path."""
    arena, copy = kept
    shutil.rmtree(arena.home)
    shutil.copytree(copy, arena.home)
    forget(arena)
    return arena


def metadata_file(table: Table) -> str:
    """The metadata file that the catalog names."""
    return table.metadata_location


def manifest_list(table: Table) -> str:
    """The manifest list of the current snapshot."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return snapshot.manifest_list


def manifest(table: Table) -> str:
    """The last manifest of the current snapshot."""
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return snapshot.manifests(table.io)[-1].manifest_path


def data_file(table: Table) -> str:
    """The last data file of the current snapshot."""
    return [task.file.file_path for task in table.scan().plan_files()][-1]


def lose(path: Path, other: Path) -> None:
    """The file is gone."""
    path.unlink()


def cut(path: Path, other: Path) -> None:
    """The file ends in the middle."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def empty(path: Path, other: Path) -> None:
    """The file has no byte."""
    path.write_bytes(b"")


def replace(path: Path, other: Path) -> None:
    """The file has the content of another one of its kind."""
    path.write_bytes(other.read_bytes())


DAMAGES = (lose, cut, empty, replace)
PLACES = (metadata_file, manifest_list, manifest, data_file)
OTHER = {"consumption": "slices", "plans": "slices", "slices": "plans", "work_units": "plans"}
"""Table -> another one, whose file takes the place of its file."""
QUICK = ("consumption", data_file, lose)


def local(address: str) -> Path:
    """The path of a local address."""
    return Path(address.removeprefix("file://"))


@pytest.mark.parametrize(
    ("name", "place", "damage"),
    [
        pytest.param(
            *case,
            id="-".join([case[0], case[1].__name__, case[2].__name__]),
            marks=[] if case == QUICK else pytest.mark.slow,
        )
        for case in ((name, place, damage) for name in OTHER for place in PLACES for damage in DAMAGES)
        if case[1:] != (metadata_file, replace)  # that is another table, which no reader can know
    ],
)
def test_damaged_table_is_restored(
    trained: Arena, name: str, place: Callable[[Table], str], damage: Callable[[Path, Path], None]
) -> None:
    """No reader raises anything but DLAC's errors. The rebuild restores all rows, or names the table that has lost some."""
    before, load = rows_of(trained), trained.lakehouse.own
    path, other = local(place(load(name))), local(place(load(OTHER[name])))
    damage(path, other)
    named = []
    for read in (run_status, audit_run, lambda lakehouse, _: run_upkeep(lakehouse)):
        forget_files()
        try:
            read(connect(trained.config.at_home(trained.home)), "r")
        except DlacError as err:
            named.append(str(err))
    if name == "consumption":  # a data file has rows of one run, and the other one can be read
        assert len(named) == 3 or (place is data_file and named)
    assert all("dlac ledger rebuild" in each for each in named), named
    done = rebuild(trained)
    after = rows_of(trained)
    if place is data_file and name in ("plans", "work_units"):
        assert f"table {name!r}" in done.problems[name]
        assert not done.complete
        after[name] = before[name]
    assert after == before
    if done.complete:
        assert audit_run(trained.lakehouse, "r").exact
        assert rebuild(trained).complete


def comparable(rows: list[dict[str, object]], *seqs: int) -> list[str]:
    """Rows of run "r" in these appends, or all others, without what only a commit decides."""
    wanted = [row for row in rows if row["run"] == "r" and row["seq"] not in seqs]
    return sorted(repr({k: v for k, v in row.items() if k not in SET_BY_COMMIT}) for row in wanted)


@pytest.mark.parametrize(
    "damage",
    [lose, *(pytest.param(each, marks=pytest.mark.slow) for each in (cut, empty, replace))],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize(
    "seq", [1, 5, *(pytest.param(each, marks=pytest.mark.slow) for each in (10, 11))], ids=lambda seq: f"append-{seq}"
)
def test_damaged_entry_is_confined(trained: Arena, seq: int, damage: Callable[[Path, Path], None]) -> None:
    """The ledger was lost with one entry of its journal: the store has its rows, or just these are lost and named."""
    before = trained.lakehouse.read_own("consumption").to_pylist()
    folder = journal_of(trained) / "r"
    damage(folder / f"{seq:012}.parquet", folder / "000000000002.parquet")
    lose_table(trained)
    done = {run.run: run for run in rebuild(trained).runs}
    assert (done["other"].problem, done["other"].missing) == ("", done["other"].appends)
    after = trained.lakehouse.read_own("consumption").to_pylist()
    if done["r"].problem:
        assert seq in (1, 11), "a checkpoint is in the store, and so is an append before a checkpoint"
        assert f"found none with seq [{seq}]" in done["r"].problem
        assert {row["seq"] for row in after if row["run"] == "r"} == set(range(1, 12)) - {seq}
    lost = [seq] if done["r"].problem else []
    assert comparable(after) == comparable(before, *lost)
    if seq == 5:  # a manifest does not repeat the phases of its checkpoint
        with open_audit(trained.lakehouse) as connection:
            costs = connection.execute("SELECT seq FROM checkpoint_costs WHERE run = 'r'").fetchall()
        checkpoints = {row["seq"] for row in before if row["kind"] == "checkpoint" and row["run"] == "r"}
        assert {each for (each,) in costs} == checkpoints - {seq}
    if seq != 11:  # a file with its number proves that it was committed, and refuses the run until it is moved away
        assert audit_run(trained.lakehouse, "r").exact != bool(lost)


def test_entry_of_another_lakehouse(trained: Arena) -> None:
    """An entry with the run and the number that were expected, but of another ledger, is not taken."""
    before = trained.lakehouse.read_own("consumption").to_pylist()
    path = journal_of(trained) / "r" / "000000000005.parquet"
    pq.write_table(pq.read_table(path).replace_schema_metadata({"dlac.ledger-uuid": "another"}), path)
    lose_table(trained)
    assert rebuild(trained).complete  # the store has the checkpoint
    assert comparable(trained.lakehouse.read_own("consumption").to_pylist()) == comparable(before)


@pytest.mark.slow
def test_damaged_table_and_entry(trained: Arena) -> None:
    """A data file of the ledger and an entry of another append are cut: the table's other files have its rows."""
    before = rows_of(trained)
    cut(local(data_file(trained.lakehouse.own("consumption"))), Path())
    cut(journal_of(trained) / "other" / "000000000002.parquet", Path())
    assert rebuild(trained).complete
    assert rows_of(trained) == before
