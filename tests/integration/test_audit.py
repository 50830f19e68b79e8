from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.expressions import And, EqualTo
from pyiceberg.io.pyarrow import schema_to_pyarrow
from rich.console import Console

from catalog.connect import Lakehouse, LakehouseConfig, connect
from catalog.errors import NoSuchRun
from catalog.ledger import Ledger, Row
from catalog.schemas import CONSUMPTION, SLICES
from dlac_pipeline.audit.audit import AuditReport, audit_run
from dlac_pipeline.audit.explain import explain_sql
from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.audit.plots import coverage_png, loss_curve_png
from dlac_pipeline.audit.report import write_report
from dlac_pipeline.audit.table import audit_table
from dlac_pipeline.recover.supervise import Event, Supervisor
from dlac_pipeline.spec import JobSpec, parse_spec

PROGRAM = Path(__file__).parents[1] / "programs" / "train_tiny.py"
ROWS = 1000
Change = Callable[[list[Row]], list[Row]]


@dataclass
class Lake:
    """A lakehouse with two finished runs of one plan: "reference", and "faulty", one of whose ranks was killed."""

    home: Path
    lakehouse: Lakehouse = field(init=False)
    names: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.lakehouse = connect(LakehouseConfig().at_home(self.home))
        self.lakehouse.create_namespace("src")
        (self.home / "journal").mkdir()
        random = np.random.default_rng(0)
        rows = pa.table(
            {
                "row_id": pa.array(np.arange(ROWS)),
                "x": pa.array(list(random.normal(size=(ROWS, 4)).astype(np.float32)), type=pa.list_(pa.float32())),
                "kept": pa.array(random.random(ROWS) < 0.9),
            }
        )
        self.lakehouse.catalog.create_table("src.t", rows.schema, properties={"write.parquet.row-group-limit": "50"})
        for start in (0, 300, 650):
            self.lakehouse.load("src.t").append(rows.slice(start, {0: 300, 300: 350, 650: 350}[start]))

    def spec(self, run: str) -> JobSpec:
        """A job with dead rows here and there, and one row group without any live row."""
        raw = {
            "run": run,
            "source": {"table": "src.t", "columns": ["row_id", "x"], "row_filter": "kept = true and row_id >= 60"},
            "order": {"batch_size": 32, "key_groups": 8, "seed": 3, "passes": 2},
            "checkpoint": {"every_steps": 8},
            "launch": {"script": str(PROGRAM), "world_size": 2},
            "params": {"journal": str(self.home / "journal"), "pause_s": "0.02"},
        }
        return parse_spec(raw, origin="the test").resolved(self.home)

    def journal(self, run: str) -> dict[int, list[int]]:
        """Step -> row ids, as the training function wrote them in the attempt whose checkpoint holds the step."""
        written: dict[tuple[int, int], list[int]] = {}
        for path in sorted((self.home / "journal").glob(f"{run}-*.jsonl")):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                written.setdefault((entry["attempt"], entry["step"]), []).extend(entry["rows"])
        steps: dict[int, list[int]] = {}
        for row in Ledger(self.lakehouse).rows(run, kinds=("checkpoint",)):
            for step in range(len(steps) + 1, row["step"] + 1):
                steps[step] = written[row["attempt"], step]
        return steps

    def row_ids(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Make the table source_rows(file, file_row, row_id) from the data files."""
        connection.execute(
            "CREATE TABLE source_rows AS SELECT filename AS file, file_row_number AS file_row, row_id "
            f"FROM read_parquet('{self.home}/warehouse/src/t/data/*.parquet', filename = true, file_row_number = true)"
        )

    def forge(self, change: Change, *, slices: Change | None = None) -> str:
        """A run whose ledger rows are those of "faulty" after `change`; `slices` changes its first cut. Returns its name."""
        name = f"forged{next(self.names)}"

        def renamed(value: str | None) -> str | None:
            return None if value is None else f"{name}:{value}"

        rows = Ledger(self.lakehouse).rows("faulty")
        if slices is not None:
            cut_id = rows_named(rows, "advance")[0]["cut_id"]
            cut = self.lakehouse.own("slices").scan(row_filter=EqualTo("cut_id", cut_id)).to_arrow().to_pylist()  # type: ignore[call-arg,arg-type]  # pydantic hides the real signature
            self.append("slices", [{**row, "cut_id": renamed(cut_id)} for row in slices(cut)])
            rows = [{**row, "cut_id": renamed(cut_id) if row["cut_id"] == cut_id else row["cut_id"]} for row in rows]
        ids = ("checkpoint_id", "parent", "head_after")
        self.append(
            "consumption",
            [{**row, "run": name, **{key: renamed(row[key]) for key in ids}} for row in change(rows)],
        )
        return name

    def append(self, table: str, rows: list[Row]) -> None:
        """Append rows behind DLAC's back."""
        schema = schema_to_pyarrow({"slices": SLICES, "consumption": CONSUMPTION}[table], include_field_ids=False)
        self.lakehouse.own(table).append(pa.Table.from_pylist(rows, schema=schema))

    def audit_forged(self, change: Change, *, slices: Change | None = None) -> AuditReport:
        """The audit of a forged run."""
        return audit_run(self.lakehouse, self.forge(change, slices=slices))


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The lakehouse of this module; tests add forged runs to it."""
    made = Lake(tmp_path_factory.mktemp("audit") / "home")
    pids: list[int] = []

    def kill_a_rank(event: Event) -> None:
        if event["event"] == "attempt" and not pids:
            pids.extend(event["pids"])
        if event["event"] == "checkpoint" and event["attempt"] == 1 and event["step"] == 24:
            os.kill(pids[1], signal.SIGKILL)

    assert Supervisor(made.spec("reference")).run().attempts == 1
    assert Supervisor(made.spec("faulty"), on_event=kill_a_rank).run().attempts == 2
    return made


@pytest.fixture(scope="module")
def audit(lake: Lake) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection over the lakehouse before anything was forged in it."""
    with open_audit(lake.lakehouse) as connection:
        lake.row_ids(connection)
        yield connection


def rows_named(rows: list[Row], *kinds: str) -> list[Row]:
    """The rows of some kinds."""
    return [row for row in rows if row["kind"] in kinds]


def until_step(rows: list[Row], step: int) -> list[Row]:
    """The rows as they were right after the checkpoint at `step`."""
    seq = next(row["seq"] for row in rows if row["kind"] == "checkpoint" and row["step"] == step)
    return [row for row in rows if row["seq"] <= seq]


def changed(which: Callable[[Row], bool], number: int = 0, **values: Any) -> Change:
    """A change of the `number`-th row that `which` picks."""

    def change(rows: list[Row]) -> list[Row]:
        chosen = [row for row in rows if which(row)][number]
        return [{**row, **values} if row is chosen else row for row in rows]

    return change


def without(which: Callable[[Row], bool], number: int = 0) -> Change:
    """A change that drops the `number`-th row that `which` picks."""

    def change(rows: list[Row]) -> list[Row]:
        chosen = [row for row in rows if which(row)][number]
        return [row for row in rows if row is not chosen]

    return change


def is_advance(row: Row) -> bool:
    """Whether a row is an advance."""
    return bool(row["kind"] == "advance")


def unchanged(rows: list[Row]) -> list[Row]:
    """The change that changes nothing."""
    return rows


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


def test_consumed_agrees_with_the_journal_on_every_row_and_checkpoint(
    lake: Lake, audit: duckdb.DuckDBPyConnection
) -> None:
    """`consumed` and `touched` say of each row of each data file what the training function saw up to each checkpoint."""
    answers = rows_of(
        audit,
        "SELECT c.run, c.step, s.row_id, consumed(s.file, s.file_row, c.checkpoint_id) AS consumed, "
        "touched('file://' || s.file, s.file_row, c.checkpoint_id) AS touched "
        "FROM lineage AS c, source_rows AS s",
    )
    seen = {(run, step): rows for run in ("reference", "faulty") for step, rows in lake.journal(run).items()}
    upto: dict[tuple[str, int], set[int]] = {}
    for run, step in sorted(seen):
        upto[run, step] = upto.get((run, step - 1), set()) | set(seen[run, step])
    assert len(answers) == ROWS * len({(row["run"], row["step"]) for row in answers}) > 10 * ROWS
    wrong = [row for row in answers if row["consumed"] is not (row["row_id"] in upto[row["run"], row["step"]])]
    assert wrong == []
    assert all(row["touched"] is row["consumed"] for row in answers)


def test_consumed_rows_are_those_of_the_journal(lake: Lake, audit: duckdb.DuckDBPyConnection) -> None:
    """Checkpoint by checkpoint, the rows of `consumed_rows` are those that were in the tensors, as often as they were."""
    found: dict[int, Counter[int]] = {}
    for row in rows_of(
        audit,
        "SELECT c.step, s.row_id FROM consumed_rows AS r JOIN checkpoints AS c USING (run, checkpoint_id) "
        "JOIN source_rows AS s ON s.file = bare_path(r.file_path) AND s.file_row = r.row WHERE r.run = 'faulty'",
    ):
        found.setdefault(row["step"], Counter())[row["row_id"]] += 1
    written: dict[int, Counter[int]] = {}
    for step, rows in lake.journal("faulty").items():
        checkpoint = next(at for at in sorted(found) if at >= step)
        written.setdefault(checkpoint, Counter()).update(rows)
    assert found == written


def test_macros_take_columns_of_any_name(audit: duckdb.DuckDBPyConnection) -> None:
    """An argument that is a column with the name of a column inside the macro means the caller's column."""
    query = (
        "SELECT count_if(consumed({0}, {1}, {2})) AS n FROM (SELECT s.file AS {0}, s.file_row AS {1}, "
        "c.checkpoint_id AS {2}, 7 AS unit, 7 AS seq, 7 AS position FROM source_rows AS s, checkpoints AS c)"
    )
    [plain] = rows_of(audit, query.format("f", "r", "c"))
    assert plain["n"] > 0
    for names in (("file_path", "row", "checkpoint_id"), ("asked_file", "asked_row", "asked_checkpoint")):
        assert rows_of(audit, query.format(*names)) == [plain]


def test_coverage_counts_every_planned_row_group(audit: duckdb.DuckDBPyConnection) -> None:
    """`coverage` has each row group with live rows once per pass, wholly consumed, none of its rows repeated."""
    [found] = rows_of(
        audit,
        "SELECT count(*) AS n, count_if(rows_consumed = live_rows AND rows_repeated = 0) AS whole "
        "FROM coverage WHERE run = 'faulty'",
    )
    [units] = rows_of(audit, "SELECT count(*) AS n FROM units WHERE live_rows > 0")
    assert found["n"] == found["whole"] == 2 * units["n"]


def test_a_running_run_is_exact_with_rows_pending(lake: Lake) -> None:
    """Rows ahead of the cursors are pending, and nothing is wrong with that."""
    report = lake.audit_forged(lambda rows: until_step(rows, 16))
    assert (report.exact, report.problems, report.finished, report.step) == (True, (), False, 16)
    assert report.rows_consumed == 16 * 32
    assert report.rows_pending == report.rows_live - 16 * 32


def test_a_run_without_checkpoints_is_exact(lake: Lake) -> None:
    """A run that has only been claimed has consumed nothing."""
    report = lake.audit_forged(lambda rows: rows[:1])
    assert (report.exact, report.head_checkpoint, report.step, report.rows_consumed) == (True, None, 0, 0)


def test_a_rewound_run_has_consumed_only_what_survives(lake: Lake) -> None:
    """After a rewind the abandoned checkpoints are off the lineage; what they had consumed can still be asked."""

    def rewound(rows: list[Row]) -> list[Row]:
        kept = until_step(rows, 32)
        target = next(row for row in rows_named(kept, "checkpoint") if row["step"] == 16)
        seq = 1 + max(row["seq"] for row in kept)
        return [*kept, {**target, "kind": "rewind", "seq": seq, "head_after": target["checkpoint_id"]}]

    name = lake.forge(rewound)
    report = audit_run(lake.lakehouse, name)
    assert (report.exact, report.step, report.checkpoints, report.checkpoints_abandoned) == (True, 16, 2, 2)
    assert report.rows_consumed == 16 * 32
    with open_audit(lake.lakehouse, run=name) as connection:
        lake.row_ids(connection)
        counted = rows_of(
            connection,
            "SELECT c.step, count_if(consumed(s.file, s.file_row, c.checkpoint_id)) AS n "
            "FROM checkpoints AS c, source_rows AS s GROUP BY c.step ORDER BY c.step",
        )
    journal = lake.journal("faulty")
    assert [(row["step"], row["n"]) for row in counted] == [
        (at, len({row for step in range(1, at + 1) for row in journal[step]})) for at in (8, 16, 24, 32)
    ]


def test_a_partly_read_row_is_touched_and_not_consumed(lake: Lake) -> None:
    """A row of which only the first tokens were read counts for `touched`, not for `consumed`, and is reported."""
    name = lake.forge(
        lambda rows: changed(lambda row: is_advance(row) and row["step"] == 8, token_end=5)(until_step(rows, 8))
    )
    assert audit_run(lake.lakehouse, name).rows_partial == 1
    with open_audit(lake.lakehouse, run=name) as connection:
        lake.row_ids(connection)
        [found] = rows_of(
            connection,
            "SELECT count_if(touched(file, file_row, checkpoint_id)) AS touched, "
            "count_if(consumed(file, file_row, checkpoint_id)) AS consumed FROM source_rows, lineage",
        )
    assert (found["touched"], found["consumed"]) == (8 * 32, 8 * 32 - 1)


def test_skipped_steps_are_counted_as_not_applied(lake: Lake) -> None:
    """Rows of steps that the engine skipped are consumed, and reported."""

    def skipped(rows: list[Row]) -> list[Row]:
        values: dict[str, Row] = {"checkpoint": {"applied_steps": 0, "skipped_steps": 8}, "advance": {"applied": False}}
        return [{**row, **values.get(row["kind"], {})} for row in until_step(rows, 8)]

    report = lake.audit_forged(skipped)
    assert report.exact
    assert report.rows_not_applied == report.rows_consumed == 8 * 32


def test_an_advance_recorded_twice_is_found(lake: Lake) -> None:
    """The same rows in two advances are rows duplicated."""

    def doubled(rows: list[Row]) -> list[Row]:
        return [*rows, rows_named(rows, "advance")[3]]

    report = lake.audit_forged(doubled)
    advance = rows_named(Ledger(lake.lakehouse).rows("faulty"), "advance")[3]
    assert (report.exact, report.rows_duplicated, report.rows_missing) == (False, advance["rows_consumed"], 0)
    assert any("once, found them again in checkpoint" in problem for problem in report.problems)


def test_overlapping_advances_are_found(lake: Lake) -> None:
    """An advance that starts before the last one ended repeats the rows between."""
    report = lake.audit_forged(changed(lambda row: is_advance(row) and row["position_start"] > 9, position_start=0))
    assert not report.exact
    assert report.rows_duplicated > 0
    assert any("once, found them again in checkpoint" in problem for problem in report.problems)


def test_a_deleted_advance_is_found(lake: Lake) -> None:
    """Deleting an advance from the table leaves rows missing behind a cursor."""
    name = lake.forge(unchanged)
    advance = rows_named(Ledger(lake.lakehouse).rows(name), "advance")[0]
    which = {key: advance[key] for key in ("run", "checkpoint_id", "cut_id", "key_group", "block")}
    conditions = [EqualTo(key, value) for key, value in which.items()]  # type: ignore[call-arg,arg-type]  # pydantic hides the real signature
    lake.lakehouse.own("consumption").delete(And(*conditions))
    report = audit_run(lake.lakehouse, name)
    assert (report.exact, report.rows_missing) == (False, advance["rows_consumed"])
    assert report.rows_consumed == 2 * report.rows_live - advance["rows_consumed"]
    assert any("behind the cursor, found them in no advance" in problem for problem in report.problems)


def test_an_advance_missing_from_the_head_is_found(lake: Lake) -> None:
    """A key group that the head does not mention has rows missing, though no cursor of its own is behind them."""
    report = lake.audit_forged(
        lambda rows: without(lambda row: is_advance(row) and row["step"] == 8)(until_step(rows, 8))
    )
    assert (report.exact, report.rows_missing, report.rows_consumed) == (False, 8 * 4, 7 * 8 * 4)
    assert report.rows_pending == report.rows_live - 8 * 32
    assert any("expected 32 rows of steps 1 to 8, found 0" in problem for problem in report.problems)


def is_second_checkpoint(row: Row) -> bool:
    """Whether a row is the checkpoint at step 16."""
    return row["kind"] == "checkpoint" and bool(row["step"] == 16)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (changed(is_advance, rows_consumed=1), "consumed, "),
        (changed(is_advance, rows_consumed=None), "found nothing consumed"),
        (changed(is_advance, rows_dead=500), "dead rows in positions 0 to"),
        (changed(is_advance, position_end=10**9), "expected positions within 0 to"),
        (changed(is_advance, block=999), "expected the block in the table slices"),
        (changed(is_advance, cut_id="nowhere"), "expected the block in the table slices"),
        (changed(is_advance, first_step=3), "of steps 1 to 8, found 32 of steps 3 to 8"),
        (changed(is_advance, last_step=6), "in steps 1 to 8, found them in steps 1 to 6"),
        (changed(is_advance, applied=False), "expected rows of 0 steps that were not applied, found 32"),
        (
            lambda rows: [row for row in rows if row["step"] != 16 or not is_advance(row)],
            "expected advances of checkpoint",
        ),
        (without(is_second_checkpoint), "before it in the ledger, found none"),
        (changed(is_second_checkpoint, skipped_steps=1), "expected 8 steps from"),
        (changed(is_second_checkpoint, seq=999), "expected one append per seq from 1 to 999"),
        (without(lambda row: row["kind"] == "leg"), "expected one row of leg 0"),
        (
            changed(lambda row: row["kind"] == "leg", detail='{"batch_size": 32, "key_groups": 8, "passes": 3}'),
            "after 3 passes of leg 0, found 2",
        ),
        (without(lambda row: row["kind"] == "checkpoint", -1), "among the checkpoints, found no such checkpoint"),
        (changed(lambda row: row["kind"] == "finish", step=1), "expected the run to finish at step"),
    ],
)
def test_a_contradiction_in_the_ledger_is_found(lake: Lake, change: Change, problem: str) -> None:
    """Whatever contradicts itself in a run's rows makes the audit inexact, and a sentence says what."""
    report = lake.audit_forged(change)
    assert not report.exact
    assert any(problem in said for said in report.problems), report.problems


def has_dead_rows(row: Row) -> bool:
    """Whether a slice has dead rows."""
    return bool(row["live_rows"] < row["rows"])


@pytest.mark.parametrize(
    ("slices", "problem"),
    [
        (without(lambda row: row["slice"] == 3), "live rows of"),
        (changed(has_dead_rows, live_rows=1), "live rows in slice"),
        (changed(lambda row: row["slice"] == 1, first_row=-1), "inside unit"),
        (changed(lambda row: row["slice"] == 1, base=0), "of its block, found it at row 0"),
        (changed(lambda row: row["slice"] == 1, a_inv=2), "expected a_inv to be the inverse"),
        (changed(lambda row: row["slice"] == 1, block_rows=7), "expected one permutation of"),
        (lambda rows: [*rows, {**rows[0], "key_group": 7, "slice": 99}], "in one slice, found them in two"),
        (changed(lambda row: row["slice"] == 1, plan_id="nowhere"), "expected plan nowhere once"),
    ],
)
def test_slices_that_do_not_fit_their_plan_are_found(lake: Lake, slices: Change, problem: str) -> None:
    """A cut that lacks live rows, holds some twice, or is no permutation makes the audit of its runs inexact."""
    report = lake.audit_forged(unchanged, slices=slices)
    assert not report.exact
    assert any(problem in said for said in report.problems), report.problems


def test_a_missing_data_file_is_found(lake: Lake) -> None:
    """The audit reads the footers of the data files that were read, and names the one that is gone."""
    file = min((lake.home / "warehouse" / "src" / "t" / "data").glob("*.parquet"))
    away = file.with_suffix(".away")
    file.rename(away)
    try:
        report = audit_run(lake.lakehouse, "reference")
    finally:
        away.rename(file)
    assert (report.exact, len(report.problems)) == (False, 1)
    assert file.name in report.problems[0]


def test_an_unknown_run_is_refused(lake: Lake) -> None:
    """The error names the run that was asked for and the runs that there are."""
    with pytest.raises(NoSuchRun, match=r"expected rows of run 'nobody'.*'faulty'.*'reference'"):
        audit_run(lake.lakehouse, "nobody")


@pytest.mark.parametrize("run", ["reference", "faulty"])
def test_the_explanation_runs_in_a_plain_duckdb(lake: Lake, run: str) -> None:
    """The script answers in a DuckDB that knows nothing of DLAC, for its own example and for any other row."""
    script = explain_sql(lake.lakehouse, run)
    with duckdb.connect() as connection:
        assert connection.execute(script).fetchall() == [(True,)]
        lake.row_ids(connection)
        counted = rows_of(
            connection,
            "SELECT count_if(consumed(file, file_row, checkpoint_id)) AS n FROM source_rows, lineage "
            f"WHERE run = '{run}' AND step = 8",
        )
    assert counted == [{"n": 8 * 32}]


def test_the_explanation_of_a_run_without_checkpoints_runs(lake: Lake) -> None:
    """Without a checkpoint there is no example, and the script still runs."""
    script = explain_sql(lake.lakehouse, lake.forge(lambda rows: rows[:1]))
    with duckdb.connect() as connection:
        connection.execute(script)
        assert connection.execute("SELECT consumed('f', 0, 'c')").fetchall() == [(False,)]


def test_the_report_compares_two_runs(lake: Lake, tmp_path: Path) -> None:
    """report.json says that the disturbed run is the undisturbed one, and report.html shows it by itself."""
    content = write_report(
        lake.lakehouse, {"reference": "reference", "faulty": "faulty"}, tmp_path / "report", {"training": 1.5}
    )
    steps = len(lake.journal("faulty"))
    assert (content["ok"], content["losses_identical"], content["steps_compared"]) == (True, True, steps)
    assert (content["rows_consumed_once"], content["no_row_twice"], content["no_row_missing"]) == (True, True, True)
    assert [recovery["resumed_step"] for recovery in content["recoveries"]] == [24]
    assert json.loads((tmp_path / "report" / "report.json").read_text()) == content
    page = (tmp_path / "report" / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2
    assert "http" not in page.replace("</html>", "")


def test_the_report_tells_runs_apart(lake: Lake, tmp_path: Path) -> None:
    """One differing loss, or an inexact audit, makes the report say no."""
    losses = next(row["losses"] for row in Ledger(lake.lakehouse).rows("faulty", kinds=("checkpoint",)))
    name = lake.forge(
        changed(lambda row: row["kind"] == "checkpoint", losses=[*losses[:-1], float(np.nextafter(losses[-1], 9.0))])
    )
    content = write_report(lake.lakehouse, {"reference": "reference", "faulty": name}, tmp_path, {})
    assert (content["ok"], content["losses_identical"], content["steps_differing"]) == (False, False, [8])
    broken = lake.forge(without(is_advance))
    content = write_report(lake.lakehouse, {"reference": "reference", "faulty": broken}, tmp_path, {})
    assert (content["ok"], content["losses_identical"], content["rows_consumed_once"]) == (False, True, False)
    assert "Not every planned row" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("picture", [loss_curve_png, coverage_png])
def test_pictures_are_png_files(lake: Lake, picture: Callable[[Lakehouse, str], bytes]) -> None:
    """Pictures are drawn without a display, also of a run that has nothing to show."""
    for run in ("faulty", lake.forge(lambda rows: rows[:1])):
        assert picture(lake.lakehouse, run).startswith(b"\x89PNG")


def test_the_table_shows_verdict_and_problems(lake: Lake) -> None:
    """The printed audit says whether it is exact and, if not, why."""
    console = Console(width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115  # closed below
    console.print(audit_table(audit_run(lake.lakehouse, "faulty")))
    console.print(audit_table(lake.audit_forged(without(is_advance))))
    console.file.close()
    text = console.export_text()
    assert "2 finished of 2 entered" in text
    assert "NO" in text
    assert "behind the cursor" in text
