"""The audit reports any change in the ledger, the slices or the data files in a sentence."""

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, Columns
from tests.fixtures import Lake
from tests.integration.audit_runs import Change, changed, doubled, is_advance, unchanged, until_step, without


def test_an_advance_recorded_twice_is_found(lake: Lake) -> None:
    """The same rows in two advances are rows duplicated."""
    name = lake.forge(doubled)
    report = audit_run(lake.lakehouse, name)
    advance = Ledger(lake.lakehouse).rows("faulty", kinds=(AdvanceRow,))[3]
    assert (report.exact, report.rows_duplicated, report.rows_missing) == (False, advance.rows_consumed, 0)
    assert any("once, found them again in checkpoint" in problem for problem in report.problems)
    with open_audit(lake.lakehouse) as connection:
        covered = connection.execute(
            "SELECT count_if(rows_consumed > live_rows), sum(rows_repeated)::BIGINT FROM coverage WHERE run = ?", [name]
        ).fetchone()
    assert covered == (0, advance.rows_consumed)


def test_an_advance_missing_from_the_head_is_found(lake: Lake) -> None:
    """Rows of a key group that the head does not mention are missing, even without a cursor past them."""
    report = lake.audit_forged(
        lambda rows: without(lambda row: is_advance(row) and row["step"] == 8)(until_step(rows, 8))
    )
    assert (report.exact, report.rows_missing, report.rows_consumed) == (False, 8 * 4, 7 * 8 * 4)
    assert report.rows_pending == report.rows_live - 8 * 32
    assert any("expected 32 rows of steps 1 to 8, found 0" in problem for problem in report.problems)


def is_second_checkpoint(row: Columns) -> bool:
    """Whether a row is the checkpoint at step 16."""
    return row["kind"] == "checkpoint" and bool(row["step"] == 16)


LEDGER: list[tuple[Change, str]] = [
    (changed(is_advance, rows_consumed=1), "consumed, "),
    (without(is_advance), "before the cursor in an advance, found none"),
    (changed(lambda row: is_advance(row) and row["position_start"] > 9, position_start=0), "once, found them again"),
    (changed(is_advance, rows_consumed=None), "found nothing consumed"),
    (changed(is_advance, rows_dead=500), "dead rows in positions 0 to"),
    (changed(is_advance, position_end=10**9), "expected positions within 0 to"),
    (changed(is_advance, block=999), "expected the block in the table slices"),
    (changed(is_advance, cut_id="nowhere"), "expected the block in the table slices"),
    (changed(is_advance, first_step=3), "of steps 1 to 8, found 32 of steps 3 to 8"),
    (changed(is_advance, last_step=6), "in steps 1 to 8, found them in steps 1 to 6"),
    (changed(is_advance, applied=False), "expected rows of 0 steps that were not applied, found 32"),
    (lambda rows: [row for row in rows if row["step"] != 16 or not is_advance(row)], "expected advances of checkpoint"),
    (without(is_second_checkpoint), "before it in the ledger, found none"),
    (changed(is_second_checkpoint, skipped_steps=1), "expected 8 steps from"),
    (changed(is_second_checkpoint, seq=999), "expected one append per seq from 1 to 999"),
    (without(lambda row: row["kind"] == "leg"), "expected one row of leg 0"),
    (
        lambda rows: changed(
            lambda row: row["kind"] == "leg",
            leg_json=next(row["leg_json"] for row in rows if row["kind"] == "leg").replace('"passes":2', '"passes":3'),
        )(rows),
        "after 3 passes of src.t, found 2",
    ),
    (without(lambda row: row["kind"] == "checkpoint", -1), "among the checkpoints, found no such checkpoint"),
    (changed(lambda row: row["kind"] == "finish", step=1), "expected the run to finish at step"),
]
"""A change of a run's ledger rows, and what the audit must say of it."""


SLICES: list[tuple[Change, str]] = [
    (without(lambda row: row["slice"] == 3), "live rows of"),
    (changed(lambda row: bool(row["live_rows"] < row["rows"]), live_rows=1), "live rows in slice"),
    (changed(lambda row: row["slice"] == 1, first_row=-1), "inside unit"),
    (changed(lambda row: row["slice"] == 1, base=0), "of its block, found it at row 0"),
    (changed(lambda row: row["slice"] == 1, a_inv=2), "expected a_inv to be the inverse"),
    (changed(lambda row: row["slice"] == 1, block_rows=7), "expected one permutation of"),
    (lambda rows: [*rows, {**rows[0], "key_group": 7, "slice": 99}], "in one slice, found them in two"),
    (changed(lambda row: row["slice"] == 1, plan_id="nowhere"), "expected plan nowhere once"),
]
"""A change of the slices of a run's cut, and what the audit must say of it."""


def test_every_contradiction_is_found(lake: Lake) -> None:
    """The audit has a sentence on the contradiction in each forged run, or in a cut that is none."""
    forgeries: list[tuple[str, Change, Change | None]] = [("faulty", change, None) for change, _ in LEDGER]
    forgeries += [("faulty", unchanged, slices) for slices, _ in SLICES]
    wanted = [expected for _, expected in (*LEDGER, *SLICES)]
    for expected, found in zip(wanted, lake.problems_of_each(forgeries), strict=True):
        assert any(expected in problem for problem in found), (expected, found)


def test_a_missing_data_file_is_found(lake: Lake) -> None:
    """The audit reads the footers of the data files that were read, and names the missing file."""
    file = min((lake.home / "warehouse" / "src" / "t" / "data").glob("*.parquet"))
    away = file.with_suffix(".away")
    file.rename(away)
    try:
        report = audit_run(lake.lakehouse, "reference")
    finally:
        away.rename(file)
    assert (report.exact, len(report.problems)) == (False, 1)
    assert file.name in report.problems[0]
