"""The audit reports any change in the ledger of a run of several legs, streamed sources or followed tables."""

import json
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pyarrow as pa
import pytest

from dlac_pipeline.lakehouse.ledger.typed_rows import Columns
from tests.integration.audit_runs import Change, Workshop, changed, is_advance, trained, unchanged, until_step, without


def leg_changed(number: int, change: Callable[[dict[str, Any]], object]) -> Change:
    """A change of the JSON of the `number`-th leg."""

    def changed_rows(rows: list[Columns]) -> list[Columns]:
        leg = [row for row in rows if row["kind"] == "leg"][number]
        record = json.loads(leg["leg_json"])
        change(record)
        return [{**row, "leg_json": json.dumps(record)} if row is leg else row for row in rows]

    return changed_rows


def of_source(number: int, **values: Any) -> Callable[[dict[str, Any]], object]:
    """A change of what a leg binds of a source."""
    return lambda record: record["sources"][number].update(values)


def moved_cursor(record: dict[str, Any]) -> None:
    """Where the first key group stands when the leg begins, one position further."""
    record["sources"][0]["start"]["cursors"][0][2] += 1


def is_split(row: Columns) -> bool:
    """Whether an advance ends inside a row."""
    return is_advance(row) and row["token_end"] is not None


def has_filtered(row: Columns) -> bool:
    """Whether an advance passed over rows that the transform left out, and over none that it refused."""
    return is_advance(row) and row["rows_filtered"] > 1 and not row["rows_quarantined"]


def has_quarantined(row: Columns) -> bool:
    """Whether an advance passed over rows that the transform refused."""
    return is_advance(row) and row["rows_quarantined"] > 0


def as_consumed(rows: list[Columns]) -> list[Columns]:
    """The first filtered row of an advance, claimed to be consumed."""
    row = next(row for row in rows if has_filtered(row))
    values = {"rows_consumed": row["rows_consumed"] + 1, "rows_filtered": row["rows_filtered"] - 1}
    return changed(has_filtered, **values)(rows)


def shifted(rows: list[Columns]) -> list[Columns]:
    """A filtered position, moved out of its advance."""
    row = next(row for row in rows if has_filtered(row))
    return changed(has_filtered, filtered=[*row["filtered"][:-1], row["position_end"] + 1])(rows)


def not_emptied(record: dict[str, Any]) -> None:
    """The pass to come of the second source, over the plan from before everything was excluded."""
    start = record["sources"][1]["start"]
    start["upcoming"] = [[start["open"][0]["plan_id"], 1]]


def plan_of_before(rows: list[Columns]) -> list[Columns]:
    """An advance of the last leg on an open pass, with the plan from before the exclusions."""
    first = next(row for row in rows if is_advance(row))
    return changed(
        lambda row: is_advance(row) and row["cut_id"] == first["cut_id"] and row["plan_id"] != first["plan_id"],
        plan_id=first["plan_id"],
    )(rows)


CONTRADICTIONS: list[tuple[str, Change, str]] = [
    ("mixed", leg_changed(1, lambda record: record.update(batch_size=64)), "expected 64 rows of steps"),
    ("mixed", leg_changed(1, lambda record: record.update(start_step=27)), "expected leg 1 to begin at step 28"),
    ("mixed", leg_changed(1, lambda record: record.update(key_groups=8)), "number of key groups in all legs"),
    ("mixed", leg_changed(0, of_source(1, passes=2)), "expected 2 passes over src.b in leg 0, found 0 before it and 1"),
    ("mixed", leg_changed(1, moved_cursor), "where leg 1 begins, found"),
    ("mixed", leg_changed(0, lambda record: record["sources"].pop()), "expected plan nothing"),
    ("mixed", leg_changed(0, of_source(0, start={})), "expected plan nothing"),
    ("mixed", without(lambda row: row["kind"] == "leg", 1), "expected one row of leg 1"),
    ("mixed", without(is_advance, 5), "before the cursor in an advance, found none"),
    ("mixed", without(is_advance, -1), "before the cursor in an advance, found none"),
    ("mixed", changed(lambda row: row["source"] == 0, source=1), "expected plan"),
    ("mixed", changed(is_advance, 3, source=7), "expected plan nothing"),
    ("mixed", changed(is_advance, rows_filtered=1, rows_consumed=0), "expected 1 filtered and 0 quarantined"),
    ("mixed", changed(is_advance, token_end=3), "expected whole rows"),
    ("mixed", changed(lambda row: is_advance(row) and not row["applied"], applied=True), "found rows of both"),
    ("packed", changed(is_split, token_end=2000), "expected the next advance at position"),
    ("packed", changed(is_split, token_end=None), "expected the next advance at position"),
    ("packed", changed(is_split, 4, token_end=0), "expected tokens before 0"),
    ("packed", without(is_advance, 5), "expected the next advance at position"),
    ("packed", without(is_advance, -1), "before the cursor|of steps"),
    ("packed", changed(is_advance, 5, last_step=1), "none before step"),
    ("packed", leg_changed(1, moved_cursor), "where leg 1 begins, found"),
    ("transformed", as_consumed, "filtered and 0 quarantined positions to be named"),
    ("transformed", changed(has_filtered, filtered=None), "positions to be named, found 0"),
    ("transformed", shifted, "expected filtered and quarantined rows once and in positions"),
    ("transformed", changed(has_quarantined, quarantined=None, rows_quarantined=0), "0 quarantined"),
    ("excluded", plan_of_before, "dead rows in positions|expected plan"),
    ("excluded", leg_changed(1, lambda record: record["sources"][0]["start"]["open"].clear()), "expected plan"),
    ("followed", leg_changed(2, lambda record: record["sources"][0]["start"]["upcoming"].clear()), "expected plan"),
    ("emptied", leg_changed(1, not_emptied), "expected the run to finish after 2 passes of src.mt, found 1"),
    ("plain", leg_changed(0, of_source(0, follow="appends")), "in one pass of a followed table, found it in passes"),
    ("endless", leg_changed(0, lambda record: record.update(steps=40)), "expected the run to finish at step 40"),
]
"""Run, change of its ledger rows, and what the audit must say of it: either part of "a|b"."""


@pytest.mark.soak
def test_every_contradiction_is_found(workshop: Workshop) -> None:
    """The audit has a sentence on each forged run."""
    forgeries = [(trained(workshop, kind), change, None) for kind, change, _ in CONTRADICTIONS]
    for (kind, _, expected), found in zip(CONTRADICTIONS, workshop.problems_of_each(forgeries), strict=True):
        assert any(part in problem for problem in found for part in expected.split("|")), (kind, expected, found)


@pytest.mark.slow
def test_repeated_row_of_followed_table_is_duplicated(workshop: Workshop) -> None:
    """Where each pass must be over other rows, a row that is consumed in three passes counts as duplicated twice."""
    report = workshop.audit_forged(leg_changed(0, of_source(0, follow="appends")), of=trained(workshop, "plain"))
    assert (report.rows_consumed, report.rows_duplicated) == (3 * 203, 2 * 203)


@pytest.mark.parametrize(
    ("kind", "step"),
    [
        ("packed", 16),
        *(
            pytest.param(kind, step, marks=pytest.mark.soak)
            for kind, step in product(("mixed", "packed", "excluded"), (4, 16, 32))
            if (kind, step) != ("packed", 16)
        ),
    ],
)
def test_what_was_committed_at_any_checkpoint_is_exact(workshop: Workshop, kind: str, step: int) -> None:
    """An unfinished run is exact in its first leg and after it: rows ahead of the cursors are pending."""
    report = workshop.audit_forged(partial(until_step, step=step), of=trained(workshop, kind))
    assert (report.exact, report.problems, report.step) == (True, (), step)
    assert report.rows_pending > 0


@pytest.mark.slow
def test_falsely_empty_plan_is_no_pass(workshop: Workshop) -> None:
    """The units of its plan show whether a pass that was never entered had live rows."""
    run = trained(workshop, "emptied")
    plans = workshop.lakehouse.own("plans")

    def over_a_liar(record: dict[str, Any]) -> None:
        not_emptied(record)
        ((plan_id, _),) = record["sources"][1]["start"]["upcoming"]
        told = plans.scan(row_filter=f"plan_id = '{plan_id}'").to_arrow().to_pylist()[0]
        plans.append(
            pa.Table.from_pylist([{**told, "plan_id": "liar", "live_rows": 0}], schema=plans.schema().as_arrow())
        )
        record["sources"][1]["start"]["upcoming"] = [["liar", 1]]

    report = workshop.audit_forged(leg_changed(1, over_a_liar), of=run)
    assert not report.exact
    assert "expected the run to finish after 2 passes of src.mt, found 1" in report.problems


@pytest.mark.slow
def test_slices_are_checked_in_several_legs(workshop: Workshop) -> None:
    """A cut that differs from the plan makes the run inexact, in any leg that reads it."""
    cut = changed(lambda row: row["slice"] == 1, base=0)
    report = workshop.audit_forged(unchanged, of=trained(workshop, "excluded"), slices=cut)
    assert any("of its block, found it at row 0" in problem for problem in report.problems)
