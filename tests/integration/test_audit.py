"""The audit of runs that are what they should be, and what it prints."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.extensions.auditors.queries import lock_to_lakehouse
from dlac_pipeline.extensions.erasure.explain import explain_sql
from dlac_pipeline.lakehouse.iceberg import own_rows
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, Columns
from examples.demo.report import write_report
from tests.fixtures import ROWS, Lake
from tests.integration.audit_runs import (
    changed,
    check_script_agrees,
    doubled,
    is_advance,
    rows_named,
    until_step,
    without,
)


@pytest.mark.parametrize("run", ["reference", "faulty"])
def test_the_audit_of_a_finished_run_is_exact(lake: Lake, run: str) -> None:
    """Every live row of both passes is consumed once, whether or not a rank was killed."""
    report = audit_run(lake.lakehouse, run)
    live = len({row for rows in lake.journal(run).values() for row in rows})
    assert (report.exact, report.problems, report.finished) == (True, (), True)
    assert (report.rows_live, report.rows_consumed, report.passes_finished) == (live, 2 * live, 2)
    assert report.rows_excluded == ROWS - live > 60
    assert report.attempts == report.recoveries + 1 == (2 if run == "faulty" else 1)
    assert json.loads(json.dumps(report.to_json()))["exact"] is True


@pytest.mark.slow
def test_a_rewound_run_has_consumed_only_what_survives(lake: Lake) -> None:
    """After a rewind the abandoned checkpoints are off the lineage; what they had consumed can still be asked."""
    name = lake.forge(rewound)
    report = audit_run(lake.lakehouse, name)
    assert (report.exact, report.step, report.checkpoints, report.checkpoints_abandoned) == (True, 16, 2, 2)
    assert report.rows_consumed == 16 * 32
    with open_audit(lake.lakehouse, run=name) as connection:
        lake.row_ids(connection, "t")
        counted = rows_of(
            connection,
            "SELECT c.step, count_if(consumed(s.file, s.file_row, c.checkpoint_id)) AS n "
            "FROM checkpoints AS c, source_rows AS s GROUP BY c.step ORDER BY c.step",
        )
    journal = lake.journal("faulty")
    assert [(row["step"], row["n"]) for row in counted] == [
        (at, len({row for step in range(1, at + 1) for row in journal[step]})) for at in (8, 16, 24, 32)
    ]


def rewound(rows: list[Columns]) -> list[Columns]:
    """The run, taken back from step 32 to step 16."""
    kept = until_step(rows, 32)
    target = next(row for row in rows_named(kept, "checkpoint") if row["step"] == 16)
    seq = 1 + max(row["seq"] for row in kept)
    return [*kept, {**target, "kind": "rewind", "seq": seq, "head_after": target["checkpoint_id"]}]


@pytest.mark.slow
def test_script_ends_with_verdict(lake: Lake) -> None:
    """The script's totals, problems and verdict are the audit's, of runs that are exact and of such that are not."""
    for run in ("reference", "faulty", lake.forge(rewound), lake.forge(lambda rows: rows[:1])):
        assert check_script_agrees(lake.lakehouse, run).exact
    assert check_script_agrees(lake.lakehouse, "faulty", "16").step == 16
    repeated, lacking = (
        check_script_agrees(lake.lakehouse, lake.forge(change)) for change in (doubled, without(is_advance, 3))
    )
    assert repeated.rows_duplicated > 0
    assert lacking.rows_missing > 0


@pytest.mark.slow
def test_the_report_compares_two_runs(lake: Lake, tmp_path: Path) -> None:
    """It finds the disturbed run equal to the undisturbed one, and one differing loss otherwise."""
    runs = {"reference": "reference", "faulty": "faulty"}
    content = write_report(lake.lakehouse, runs, tmp_path / "report", {"training": 1.5})
    steps = len(lake.journal("faulty"))
    assert (content["ok"], content["losses_identical"], content["steps_compared"]) == (True, True, steps)
    assert (content["rows_consumed_once"], content["no_row_twice"], content["no_row_missing"]) == (True, True, True)
    assert [recovery["resumed_step"] for recovery in content["recoveries"]] == [24]
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == content
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", page)  # which may spell anything
    losses = next(row.losses for row in Ledger(lake.lakehouse).rows("faulty", kinds=(CheckpointRow,)))
    other = [*losses[:-1], float(np.nextafter(losses[-1], 9.0))]
    name = lake.forge(changed(lambda row: row["kind"] == "checkpoint", losses=other))
    content = write_report(lake.lakehouse, {"reference": "reference", "faulty": name}, tmp_path, {})
    assert (content["ok"], content["losses_identical"], content["steps_differing"]) == (False, False, [8])


@pytest.mark.slow
def test_a_query_opens_only_tables_it_needs(lake: Lake) -> None:
    """Views and macros answer the same as with everything defined. A query of no table opens none."""
    queries = {
        "FROM checkpoints ORDER BY ALL": {"consumption"},
        "SELECT consumed(file_path, 0, (SELECT max(checkpoint_id) FROM lineage)) FROM units ORDER BY ALL": None,
        "SELECT count(*) FROM passed_over_rows": None,
    }
    with open_audit(lake.lakehouse) as everything:
        for query, tables in queries.items():
            with open_audit(lake.lakehouse, query=query) as connection:
                assert connection.execute(query).fetchall() == everything.execute(query).fetchall(), query
                shown = {name for (name,) in connection.execute("SHOW TABLES").fetchall()}
            assert tables is None or shown & set(TABLES) == tables
        shown = {name for (name,) in everything.execute("SHOW TABLES").fetchall()}
    for query, expected in {"SELECT 1": set(), "SHOW TABLES": shown}.items():
        with open_audit(lake.lakehouse, query=query) as connection:
            assert {name for (name,) in connection.execute("SHOW TABLES").fetchall()} == expected


@pytest.mark.slow
def test_large_ledger_answers_the_same(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger that is read from its files has the rows of one that is loaded, with and without access to other files."""
    ledger = Ledger(lake.lakehouse)
    rows, report = ledger.rows("faulty"), audit_run(lake.lakehouse, "faulty")
    explained = explain_sql(lake.lakehouse, "faulty")
    queries = [
        "FROM consumed_rows ORDER BY ALL",
        "FROM coverage ORDER BY ALL",
        "SELECT file_path, consumed(file_path, 0, (SELECT max(checkpoint_id) FROM lineage)) FROM units ORDER BY ALL",
    ]
    loaded = [_answer_of(lake, query) for query in queries]
    monkeypatch.setattr(own_rows, "LARGE_ROWS", 0)
    assert ledger.rows("faulty") == rows
    assert len(ledger.head_rows("faulty")) < len(rows)
    assert audit_run(lake.lakehouse, "faulty") == report
    assert explain_sql(lake.lakehouse, "faulty") == explained
    assert [_answer_of(lake, query) for query in queries] == loaded


def _answer_of(lake: Lake, query: str) -> list[tuple[object, ...]]:
    """Return the answer of `dlac sql`."""
    with open_audit(lake.lakehouse, query=query) as connection:
        lock_to_lakehouse(connection, lake.lakehouse)
        return connection.execute(query).fetchall()
