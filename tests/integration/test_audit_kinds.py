"""The audit of every kind of run equals the tensors: mixtures, packing, transforms, exclusions, followed tables."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import duckdb
import pytest

from dlac_pipeline.audit.audit import AuditReport, audit_open_run, open_run
from dlac_pipeline.audit.lakehouse_sql import rows_of
from dlac_pipeline.extensions.look.goodput import goodput_of_rows, read_goodput
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from tests.integration.audit_runs import KINDS, TABLES, Workshop, check_script_agrees, tokens_of, trained

Opened = Callable[[str], duckdb.DuckDBPyConnection]


DETAILED = ("followed", "packed", "transformed")
"""Kinds of runs that `make test` compares. They have a mixture, packing, a transform, exclusions and a followed table."""
OTHERS = [pytest.param(kind, marks=pytest.mark.soak) for kind in sorted(KINDS.keys() - set(DETAILED))]


@pytest.fixture(params=[*DETAILED, *OTHERS])
def run(request: pytest.FixtureRequest, workshop: Workshop) -> str:
    """The name of a run of one kind, trained when it is first asked for."""
    return trained(workshop, request.param)


@pytest.fixture(scope="session")
def opened(workshop: Workshop) -> Iterator[Opened]:
    """Gives the audit connection of a run, with source_rows; made once, as no test changes these runs."""
    with ExitStack() as connections:

        @cache
        def connection_of(run: str) -> duckdb.DuckDBPyConnection:
            connection = connections.enter_context(open_run(workshop.lakehouse, trained(workshop, run)))
            workshop.row_ids(connection, *TABLES[KINDS[run]])
            return connection

        yield connection_of


@pytest.fixture(scope="session")
def audited(workshop: Workshop, opened: Opened) -> Callable[[str], AuditReport]:
    """Gives the audit of a run; made once, as no test changes these runs."""
    return cache(lambda run: audit_open_run(workshop.lakehouse, opened(run), run))


def items_of(run: str, row_id: int) -> int:
    """How often a row is in the tensors in each pass: its tokens, or its samples."""
    if run.endswith("packed"):
        return tokens_of(row_id)
    if run == "transformed":
        return 0 if row_id % 3 == 0 or row_id % 50 == 7 else 1 + (row_id % 5 == 0)
    return 1


def times_consumed(run: str, seen: Counter[int]) -> Counter[int]:
    """Row id -> how often it was wholly in the tensors."""
    return Counter({row_id: n // items_of(run, row_id) for row_id, n in seen.items() if n >= items_of(run, row_id)})


def test_audit_counts_what_tensors_had(workshop: Workshop, audited: Callable[[str], AuditReport], run: str) -> None:
    """Consumed and partly read rows equal the tensors, rows of skipped steps are counted, and nothing contradicts."""
    report = audited(run)
    seen = workshop.seen_until(run, report.step)
    assert (report.exact, report.problems) == (True, ())
    assert report.step == max(workshop.seen[run])
    assert report.rows_consumed == times_consumed(run, seen).total()
    assert report.rows_partial == sum(n % items_of(run, row_id) > 0 for row_id, n in seen.items())
    assert (report.rows_not_applied > 0) == (run in ("mixed", "packed"))
    assert report.finished == (not run.startswith("followed"))
    if run == "transformed":
        ids = range(500)
        assert report.rows_quarantined == sum(row_id % 50 == 7 for row_id in ids)
        assert report.rows_filtered == sum(row_id % 3 == 0 and row_id % 50 != 7 for row_id in ids)


def test_consumed_and_touched_agree_with_the_tensors(workshop: Workshop, opened: Opened, run: str) -> None:
    """`consumed` and `touched` say of each row and checkpoint what was in the tensors up to there."""
    answers = rows_of(
        opened(run),
        "SELECT c.step, s.row_id, bool_or(consumed(s.file, s.file_row, c.checkpoint_id)) AS consumed, "
        "bool_or(touched('file://' || s.file, s.file_row, c.checkpoint_id)) AS touched "
        "FROM lineage AS c, source_rows AS s GROUP BY c.step, s.row_id",
    )
    seen = {step: workshop.seen_until(run, step) for step in {answer["step"] for answer in answers}}
    assert len(answers) > 5 * len(workshop.seen[run])
    for answer in answers:
        n, items = seen[answer["step"]][answer["row_id"]], items_of(run, answer["row_id"])
        assert (answer["consumed"], answer["touched"]) == (n >= items > 0, n > 0), answer


def test_consumed_rows_are_those_of_the_tensors(workshop: Workshop, opened: Opened, run: str) -> None:
    """Each row is in `consumed_rows` as often as it was wholly in the tensors; quarantined rows are named with the reason."""
    connection = opened(run)
    found = counted(connection, "consumed_rows")
    quarantined = rows_of(connection, "FROM passed_over_rows WHERE kind = 'quarantined'")
    assert found == times_consumed(run, workshop.seen_until(run, max(workshop.seen[run])))
    assert len(quarantined) == (10 if run == "transformed" else 0)
    assert all("not this one" in row["reason"] for row in quarantined)


def counted(connection: duckdb.DuckDBPyConnection, view: str) -> Counter[int]:
    """Row id -> rows of a view."""
    rows = rows_of(
        connection,
        f"SELECT s.row_id, count(*) AS n FROM {view} AS r "
        "JOIN source_rows AS s ON s.file = bare_path(r.file_path) AND s.file_row = r.row GROUP BY s.row_id",
    )
    return Counter({row["row_id"]: row["n"] for row in rows})


def test_coverage_and_sources_add_up(opened: Opened, audited: Callable[[str], AuditReport], run: str) -> None:
    """Counts by row groups, by passes, by sources and in total are the same."""
    connection = opened(run)
    [by_group] = rows_of(
        connection,
        "SELECT sum(rows_consumed)::BIGINT AS rows_consumed, sum(live_rows - rows_consumed - rows_passed)::BIGINT AS "
        "rows_pending, sum(rows_repeated)::BIGINT AS rows_duplicated FROM coverage",
    )
    sums = ", ".join(f"sum({name})::BIGINT AS {name}" for name in by_group)
    [by_pass] = rows_of(connection, f"SELECT {sums} FROM passes")
    [by_source] = rows_of(connection, f"SELECT {sums} FROM sources")
    names = rows_of(connection, "SELECT name FROM sources ORDER BY source")
    [by_row] = rows_of(connection, "SELECT count(*) AS rows_consumed FROM consumed_rows")
    report = audited(run).to_json()
    assert by_group == by_pass == by_source == {name: report[name] for name in by_group}
    assert by_row["rows_consumed"] == report["rows_consumed"]
    assert [row["name"] for row in names] == [f"src.{table}" for table in TABLES[KINDS[run]]]


@pytest.mark.parametrize(
    "run",
    ["packed", *(pytest.param(kind, marks=pytest.mark.soak) for kind in sorted(KINDS.keys() - {"packed"}))],
    indirect=True,
)
def test_the_explanation_runs_in_a_plain_duckdb(workshop: Workshop, run: str) -> None:
    """The script ends with the totals and the verdict of the audit, in a DuckDB that knows nothing of DLAC."""
    assert check_script_agrees(workshop.lakehouse, run).exact


@pytest.mark.slow
def test_the_legs_of_a_run_are_listed(opened: Opened) -> None:
    """`legs` names each leg with its first step and its batch, as the specs asked for them."""
    legs = sorted((leg["leg"], leg["start_step"], leg["per_batch"]) for leg in rows_of(opened("mixed"), "FROM legs"))
    assert legs == [(0, 0, 16), (1, 28, 32)]


@pytest.mark.slow
def test_rows_excluded_unread_are_not_live(workshop: Workshop, opened: Opened) -> None:
    """Of a pass that was entered, rows that were excluded before they were read are neither live nor missing."""
    passes = sorted(rows_of(opened("excluded"), "FROM passes"), key=lambda row: int(row["pass"]))
    seen = workshop.seen_until("excluded", max(workshop.seen["excluded"]))
    kept = [row_id for row_id in range(600) if not 100 <= row_id < 330 and row_id % 2 == 0]
    assert [row["rows_pending"] + row["rows_missing"] for row in passes] == [0, 0, 0]
    assert passes[2]["rows_live"] == passes[2]["rows_consumed"] == len(kept)
    assert len(kept) < passes[0]["rows_live"] == passes[0]["rows_consumed"] < 600
    assert all(seen[row_id] == 3 for row_id in kept)


def test_goodput_needs_head_rows_only(workshop: Workshop, opened: Opened, run: str) -> None:
    """The status asks it without advances, and gets the same."""
    found = goodput_of_rows(Ledger(workshop.lakehouse).head_rows(run), recoveries_of(workshop.lakehouse, run))
    assert found is not None
    assert found["trained_s"]
    assert found == read_goodput(opened(run), run)
