import os
from collections import Counter
from datetime import datetime
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import LessThan
from pyiceberg.io.pyarrow import _dataframe_to_data_files

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.extensions.upkeep.pins import list_pins
from dlac_pipeline.lakehouse.errors import NoProgress, ResumeMismatch
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, LegRow, QuarantinedRowsRow
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from tests.conftest import Arena, Steps, source_rows

SMALL: dict[str, Any] = {"world_size": 1, "batch_size": 16, "key_groups": 4, "every_steps": 3, "passes": 1}
FOLLOWING: dict[str, Any] = {**SMALL, "follow": "appends"}


def changed(spec: JobSpec, **launch: Any) -> JobSpec:
    """The spec with a new leg allowed."""
    return spec.model_copy(update={"launch": spec.launch.model_copy(update={"new_leg": True, **launch})})


def flat(steps: Steps) -> list[int]:
    """Row ids of all steps."""
    return [row for ids in steps.values() for row in ids]


def legs(arena: Arena, run: str) -> list[Leg]:
    """The committed legs of a run."""
    return [Leg.from_record(row.record) for row in arena.rows(run, LegRow)]


def append(arena: Arena, start: int, count: int) -> None:
    """Append rows start .. start+count-1."""
    arena.lakehouse.load("src.t").append(source_rows(start, count))


def rewrite(arena: Arena, *, but_first: int = 0) -> None:
    """Rewrite all data files into one, in the order of the row ids, and leave some rows out."""
    table = arena.lakehouse.load("src.t")
    rows = table.scan().to_arrow().sort_by("row_id").slice(but_first)
    with table.transaction() as transaction, transaction.update_snapshot().overwrite() as overwrite:
        for task in table.scan().plan_files():
            overwrite.delete_data_file(task.file)
        for file in _dataframe_to_data_files(table.metadata, rows, table.io):
            overwrite.append_data_file(file)


@pytest.mark.slow
def test_a_run_goes_on_to_what_was_appended(arena: Arena) -> None:
    """Every launch reads the new rows, each once. The boundary is inside a batch, and the tail waits."""
    arena.table(appends=(100,), row_group_rows=20)
    spec = arena.spec("r", **FOLLOWING)
    first = arena.train(spec)
    assert len(flat(first)) == 96  # six batches of 16; four rows wait
    assert set(flat(first)) < set(range(100))
    assert arena.train(spec) == {}
    append(arena, 100, 50)
    second = arena.train(spec)
    assert min(second) == 7
    assert len(flat(second)) == 48
    append(arena, 150, 14)
    third = arena.train(spec)
    every = flat(first) + flat(second) + flat(third)
    assert len(every) == 160
    assert Counter(every).most_common(1)[0][1] == 1
    assert any(row < 100 <= other for row in second[7] for other in second[7]), "old and new rows share a batch"
    assert [leg.index for leg in legs(arena, "r")] == [0, 1, 2]


@pytest.mark.slow
def test_followed_snapshot_is_pinned_and_released(arena: Arena) -> None:
    """A snapshot that only deletes is pinned, too, for history is counted from there; retired legs free theirs."""
    arena.table(appends=(100,), row_group_rows=50)
    spec = arena.spec("r", **FOLLOWING, identity_columns=["row_id"], keep_last=1)
    read = flat(arena.train(spec))
    arena.lakehouse.load("src.t").delete(LessThan("row_id", 10))  # type: ignore[call-arg,arg-type]  # as above
    assert arena.train(spec) == {}  # a launch that commits nothing has a pin, too, until the next has caught up
    assert len(list_pins(arena.lakehouse, "src.t")) == 2
    arena.lakehouse.load("src.t").delete(LessThan("row_id", 20))  # type: ignore[call-arg,arg-type]  # as above
    append(arena, 100, 64)
    arena.lakehouse.load("src.t").maintenance.expire_snapshots().older_than(datetime(2100, 1, 1)).commit()
    read += flat(arena.train(spec))
    assert len(read) == len(set(read)) == 160
    pins = list_pins(arena.lakehouse, "src.t")
    assert [pin.needed_by for pin in pins] == [("r",)] * 2  # the last leg began in the tail of the first
    assert [pin.snapshot_id for pin in pins] == [leg.sources[0].snapshot_id for leg in legs(arena, "r")]


def test_new_leg_changes_settings(arena: Arena) -> None:
    """Each change is a leg; every row that is still wanted is read once per pass across all of them."""
    arena.table(appends=(200, 100), row_group_rows=20)
    settings = {**SMALL, "passes": 2}
    first = arena.train(arena.spec("r", **settings), until=5)
    wider = {**settings, "batch_size": 32}
    with pytest.raises(ResumeMismatch, match=r"(?s)batch_size: committed 16, asked for 32.*--new-leg"):
        arena.train(arena.spec("r", **wider))
    with pytest.raises(ResumeMismatch, match=r"cannot change:\n  key_groups: committed 4, asked for 8"):
        arena.train(changed(arena.spec("r", **{**wider, "key_groups": 8})))
    second = arena.train(changed(arena.spec("r", **wider)), until=8)
    assert [len(ids) for ids in second.values()] == [32] * 4
    third = arena.train(changed(arena.spec("r", **{**wider, "exclude": ["row_id >= 250"]})))
    read = Counter(flat({s: ids for s, ids in first.items() if s <= 3}))
    read += Counter(flat({s: ids for s, ids in second.items() if s <= 6}))
    assert max(flat(third)) < 250
    total = read + Counter(flat(third))
    assert {row: total[row] for row in range(250)} == dict.fromkeys(range(250), 2)
    assert [leg.batch_size for leg in legs(arena, "r")] == [16, 32, 32]
    assert [leg.start_step for leg in legs(arena, "r")] == [0, 3, 6]


def test_checkpoint_before_claim_keeps_leg(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first checkpoint of the replaced attempt lands just before the claim: another seed is refused, not mixed in."""
    arena.table()
    spec = arena.trained("raced", world_size=1, every_steps=5, until=3)
    other = arena.spec("raced", world_size=1, every_steps=5, seed=99)
    real = claim

    def late_claim(ledger: Any, run: str, **options: Any) -> Any:
        monkeypatch.undo()
        fence = ledger.state(run).fence
        leg = first_leg(spec, [make_plan(arena.lakehouse, spec.source)])
        rows = [CheckpointRow(checkpoint_id="c5", step=5), LegRow(checkpoint_id="c5", leg=0, leg_json=leg.to_json())]
        attempt = Attempt(run=run, number=fence.attempt, nonce=fence.nonce)
        commit_checkpoint(ledger, attempt, checkpoint_id="c5", parent=None, rows=rows)
        return real(ledger, run, **options)

    monkeypatch.setattr("dlac_pipeline.supervise.start.claim.claim", late_claim)
    with pytest.raises(ResumeMismatch, match="seed: committed 3, asked for 99"):
        start_attempt(Plans(arena.lakehouse), other, ClaimRequest())


@pytest.mark.slow
def test_later_snapshot_starts_next_pass(arena: Arena) -> None:
    """Naming another snapshot ends the pass over the old one, and continues with passes over the new one."""
    arena.table(appends=(100,), row_group_rows=20)
    settings = {**SMALL, "passes": 2}
    first = arena.train(arena.spec("r", **settings), until=5)
    append(arena, 100, 60)
    later = arena.lakehouse.load("src.t").current_snapshot()
    assert later is not None
    rest = arena.train(changed(arena.spec("r", **settings, version=later.snapshot_id)))
    total = Counter(flat({s: ids for s, ids in first.items() if s <= 3})) + Counter(flat(rest))
    assert total == Counter(range(100)) + Counter(range(160))


@pytest.mark.slow
def test_renamed_table_resumes(arena: Arena) -> None:
    """The pin keeps the files that are read, and the table counts by its uuid. The spec gives its new name."""
    arena.table(appends=(100, 60), row_group_rows=20)
    whole = arena.train(arena.spec("whole", **SMALL))
    arena.train(arena.spec("r", **SMALL), until=5)
    append(arena, 160, 50)
    table = arena.lakehouse.load("src.t")
    current = table.current_snapshot()
    assert current is not None
    for snapshot in table.snapshots():
        if snapshot.snapshot_id != current.snapshot_id and all(
            ref.snapshot_id != snapshot.snapshot_id for ref in table.refs().values()
        ):
            table.maintenance.expire_snapshots().by_id(snapshot.snapshot_id).commit()
            table = arena.lakehouse.load("src.t")
    arena.lakehouse.catalog.rename_table("src.t", "src.renamed")
    rest = arena.train(arena.spec("r", **SMALL, table="src.renamed"))
    assert rest == {step: ids for step, ids in whole.items() if step > 3}


def damage(path: str, row_group: int) -> None:
    """Overwrite the pages of a row group's first column."""
    chunk = pq.ParquetFile(path).metadata.row_group(row_group).column(0)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    with open(path, "r+b") as stream:
        stream.seek(start)
        stream.write(b"\xff" * chunk.total_compressed_size)


@pytest.mark.slow
def test_damaged_row_group_is_quarantined(arena: Arena) -> None:
    """Under this policy the ledger names the omitted rows and the reason, and every other row is read once."""
    arena.table(appends=(100, 60), row_group_rows=20)
    path = sorted(arena.lakehouse.load("src.t").inspect.files()["file_path"].to_pylist())[0]
    damage(path.removeprefix("file://"), 1)
    arena.launched(arena.spec("r", **{**SMALL, "world_size": 2}, on_unreadable="quarantine"))
    read = Counter(flat(arena.journal("r")))
    assert set(read.values()) == {1}
    assert len(read) == 140
    (row,) = arena.rows("r", QuarantinedRowsRow)
    assert (row.path, row.row_group, row.rows) == (path, 1, 20)
    assert "expected row group 1" in row.reason
    report = audit_run(arena.lakehouse, "r")
    assert report.exact, report.problems
    assert (report.rows_consumed, report.rows_quarantined, report.rows_excluded) == (140, 20, 0)
    with open_audit(arena.lakehouse) as connection:
        counted = connection.execute("SELECT passes_entered, rows_consumed, rows_quarantined FROM sources").fetchall()
    assert counted == [(1, 140, 20)]


@pytest.mark.soak
def test_a_warehouse_that_is_away_is_not_damage(arena: Arena) -> None:
    """If no data file can be read nothing is quarantined under any policy. The run ends, and can resume later."""
    arena.table(appends=(100, 60), row_group_rows=20)
    spec = arena.spec("r", **{**SMALL, "world_size": 1}, on_unreadable="quarantine", attempts_without_progress=1)
    paths = [
        path.removeprefix("file://") for path in arena.lakehouse.load("src.t").inspect.files()["file_path"].to_pylist()
    ]
    launch_plan = make_plan(arena.lakehouse, spec.source)
    for path in paths:
        os.rename(path, path + ".away")
    assert arena.launch(spec, plan_ids=[launch_plan.row.plan_id]).wait() == NoProgress.exit_code
    assert not arena.rows("r", QuarantinedRowsRow)
    for path in paths:
        os.rename(path + ".away", path)
    assert arena.launch(spec, plan_ids=[launch_plan.row.plan_id]).wait() == 0
    assert sorted(flat(arena.journal("r"))) == list(range(160))
