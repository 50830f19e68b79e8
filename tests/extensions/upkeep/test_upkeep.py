"""Upkeep of DLAC's own tables: what it merges, expires and removes, and what it leaves alone."""

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import CommitTableResponse

from dlac_pipeline.extensions.upkeep.orphans import remove_orphans
from dlac_pipeline.extensions.upkeep.upkeep import compact, run_upkeep
from dlac_pipeline.lakehouse.config import KEEP_SNAPSHOTS
from dlac_pipeline.lakehouse.errors import LakehouseError, LedgerOlderThanStore
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, LedgerRow
from dlac_pipeline.lakehouse.maintenance.expiry import expire
from tests.conftest import Arena
from tests.snapshots import check_readable

RUN = "r1"
STEPS = 8
ATTEMPT = Attempt(run=RUN, number=1, nonce="n1")
Commit = Callable[..., CommitTableResponse]


def checkpoint(ledger: Ledger, step: int) -> None:
    """Commit the checkpoint of a step, with rows whose order, nulls and odd numbers must not get lost."""
    name, parent = f"c{step}", f"c{step - 1}" if step > 1 else None
    losses = [0.1, math.nan, -0.0, math.inf][: step % 5]
    rows: list[LedgerRow] = [CheckpointRow(checkpoint_id=name, parent=parent, step=step, losses=losses)]
    advances = [
        AdvanceRow(checkpoint_id=name, key_group=group, filtered=[1, 2] if group else ()) for group in (3, 1, 2, 0)
    ]
    commit_checkpoint(ledger, ATTEMPT, checkpoint_id=name, parent=parent, rows=[*rows, *advances])


@pytest.fixture
def ledger(arena: Arena) -> Ledger:
    """A ledger with a claim and eight checkpoints of one run, and a claim of another."""
    found = Ledger(arena.lakehouse)
    claim(found, RUN, nonce="n1", replaces=0)
    claim(found, "another", nonce="x", replaces=0)
    for step in range(1, STEPS + 1):
        checkpoint(found, step)
    return found


def rows_of(ledger: Ledger) -> str:
    """Every row of the run, exactly, in the order in which the ledger gives them."""
    return repr(ledger.rows(RUN))


def data_files(lakehouse: Lakehouse) -> int:
    """Data files of the ledger as it is now."""
    return len(list(lakehouse.own("consumption").scan().plan_files()))


def files_of(arena: Arena, name: str = "consumption") -> set[Path]:
    """All files of a table in the warehouse."""
    return {path for path in (arena.home / "warehouse" / "dlac" / name).rglob("*") if path.is_file()}


def before_first_commit(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], Any]) -> list[str]:
    """Something else happens when the first commit has been built and is about to be sent; gives the outcomes of commits."""
    real = SqlCatalog.commit_table
    outcomes: list[str] = []

    def commit_table(self: SqlCatalog, *request: Any) -> CommitTableResponse:
        outcomes.append("sent")
        if len(outcomes) == 1:
            happens()
        return real(self, *request)

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)
    return outcomes


def test_tagged_snapshot_is_not_expired(ledger: Ledger) -> None:
    """However many commits there are, the table retains twenty snapshots, each tagged one, and every row."""
    table = ledger.lakehouse.own("consumption")
    tagged = table.snapshots()[0].snapshot_id
    table.manage_snapshots().create_tag(tagged, "keep-me").commit()
    for step in range(STEPS + 1, 25):
        checkpoint(ledger, step)
    retained = ledger.lakehouse.own("consumption").snapshots()
    newest = [snapshot.summary["dlac.seq"] for snapshot in retained[1:] if snapshot.summary]
    assert (len(newest), newest) == (KEEP_SNAPSHOTS, [str(number) for number in range(6, 26)])
    assert sorted({row.seq for row in ledger.rows(RUN)}) == list(range(1, 26))
    assert expire(ledger.lakehouse, "consumption", keep=3) == KEEP_SNAPSHOTS - 3
    left = ledger.lakehouse.own("consumption")
    assert tagged in {snapshot.snapshot_id for snapshot in left.snapshots()}
    assert len(left.snapshots()) == 4
    run_upkeep(ledger.lakehouse, keep=1)
    assert ledger.lakehouse.own("consumption").refs()["keep-me"].snapshot_id == tagged
    check_readable(ledger.lakehouse)


def test_tag_during_expiry_stays(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain pyiceberg would drop tag and snapshot without a word; here the expiry looks again."""
    other = connect(ledger.lakehouse.config)
    oldest = other.own("consumption").snapshots()[0].snapshot_id

    def tag() -> None:
        other.own("consumption").manage_snapshots().create_tag(oldest, "just-made").commit()

    outcomes = before_first_commit(monkeypatch, tag)
    assert expire(ledger.lakehouse, "consumption", keep=5) == STEPS + 2 - 6
    assert len(outcomes) == 3  # refused, the tag itself, done
    assert other.own("consumption").refs()["just-made"].snapshot_id == oldest


def test_upkeep_changes_no_row(ledger: Ledger, arena: Arena) -> None:
    """The files of a run become one, and what a merge and expiry leave is removed. Rows, their order and the fence stay."""
    rows, state = rows_of(ledger), ledger.state(RUN).fence
    properties, before = dict(ledger.lakehouse.own("consumption").properties), files_of(arena)
    merged = compact(ledger.lakehouse)
    assert (merged.files, merged.into) == (STEPS + 1, 1)
    assert data_files(ledger.lakehouse) == 2  # and the other run's, which has too few
    assert rows_of(ledger) == rows
    assert ledger.state(RUN).fence == state
    assert ledger.lakehouse.own("consumption").properties == properties
    with ledger.lakehouse.own("consumption").transaction() as transaction:
        transaction.remove_properties(f"dlac.fence.{RUN}")
    assert ledger.state(RUN).fence == state  # from the rows
    assert compact(ledger.lakehouse).files == 0
    expire(ledger.lakehouse, "consumption", keep=1)
    removed = remove_orphans(ledger.lakehouse, "consumption")
    left = files_of(arena)
    assert len({path for path in left if path.suffix == ".parquet" and path.parts[-3] != "journal"}) == 2
    assert removed.files > STEPS
    assert removed.bytes > STEPS * 1000
    assert len(before - left) > STEPS
    assert rows_of(ledger) == rows
    check_readable(ledger.lakehouse)
    assert remove_orphans(ledger.lakehouse, "consumption").files <= 3  # what moving `main` itself has replaced
    checkpoint(ledger, STEPS + 1)
    assert rows_of(ledger).startswith(rows[:-1])


def test_commit_repeats_after_compaction(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint lands after the merge, once, and nothing of either is lost."""
    other = connect(ledger.lakehouse.config)
    rows = rows_of(ledger)
    outcomes = before_first_commit(monkeypatch, lambda: compact(other))
    checkpoint(ledger, STEPS + 1)
    assert len(outcomes) == 3  # refused, the merge, landed
    assert rows_of(ledger).startswith(rows[:-1])
    assert [row.checkpoint_id for row in ledger.rows(RUN, kinds=(CheckpointRow,))] == [
        f"c{n}" for n in range(1, STEPS + 2)
    ]
    assert data_files(other) == 3
    check_readable(other)


def test_a_sweep_in_the_middle_of_a_commit(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a commit that is under way look like orphans: they are removed, and the commit is refused and repeated."""
    other = connect(ledger.lakehouse.config)
    compact(other)
    swept: list[int] = []
    outcomes = before_first_commit(monkeypatch, lambda: swept.append(remove_orphans(other, "consumption").files))
    checkpoint(ledger, STEPS + 1)
    assert swept[0] >= 3  # data file, manifest, manifest list
    assert len(outcomes) == 3  # refused, `main` moved, landed
    assert len(ledger.rows(RUN, kinds=(CheckpointRow,))) == STEPS + 1
    check_readable(other)


def test_truncated_metadata_is_removed(ledger: Ledger) -> None:
    """Empty and half files, left by a SIGKILL or a full disk, are removed. A file that is not text is kept."""
    whole = Path(ledger.lakehouse.own("consumption").metadata_location.removeprefix("file://"))
    cut = [whole.with_name(f"09999-{number}.metadata.json") for number in range(2)]
    cut[0].touch()
    cut[1].write_bytes(whole.read_bytes()[:1000])
    assert remove_orphans(ledger.lakehouse, "consumption").files >= 2
    assert not any(path.exists() for path in cut)
    (packed := whole.with_name("09999-2.gz.metadata.json")).write_bytes(gzip.compress(whole.read_bytes()))
    with pytest.raises(LakehouseError, match="nothing was deleted"):
        remove_orphans(ledger.lakehouse, "consumption")
    assert packed.exists()


def test_another_tables_files_are_not_touched(ledger: Ledger, arena: Arena) -> None:
    """If the catalog was lost and created again over the same warehouse, a sweep refuses and names the table that it found."""
    uuid = ledger.table_uuid
    (arena.home / "catalog.db").unlink()
    lakehouse = connect(arena.lakehouse.config.model_copy(update={"name": "dlac"}))
    claim(Ledger(lakehouse), "new", nonce="n", replaces=0)
    before = files_of(arena)
    for checked, error, found in (
        (False, LedgerOlderThanStore, "journal"),
        (True, LakehouseError, f"found those of table {uuid}"),
    ):
        with pytest.raises(error, match=found):
            remove_orphans(lakehouse, "consumption", checked=checked)
    assert before <= files_of(arena)


def test_upkeep_of_all_tables_leaves_source_tables_alone(ledger: Ledger, arena: Arena) -> None:
    """Every table of DLAC's is reported on; a source keeps all its snapshots and all its files."""
    snapshots = [snapshot.snapshot_id for snapshot in arena.table(appends=(10,) * 25).snapshots()]
    files = {path for path in (arena.home / "warehouse" / "src").rglob("*") if path.is_file()}
    done = {each.table: each for each in run_upkeep(ledger.lakehouse, keep=2)}
    assert done.keys() == TABLES.keys()
    assert (done["consumption"].merged_files, done["consumption"].into_files) == (STEPS + 1, 1)
    assert not any(each.busy for each in done.values())
    assert [snapshot.snapshot_id for snapshot in arena.lakehouse.load("src.t").snapshots()] == snapshots
    assert {path for path in (arena.home / "warehouse" / "src").rglob("*") if path.is_file()} == files
