"""A kept lakehouse of each format version (tests/lakehouses/) is read, audited, rehearsed and trained on by the current code."""

import json
import tarfile
from pathlib import Path

import pytest
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints, verify_checkpoints
from dlac_pipeline.extensions.look.run_state import list_runs
from dlac_pipeline.lakehouse.iceberg.connect import among, equals, more_than
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.conftest import Arena
from tests.integration.audit_runs import Workshop
from tests.integration.test_cli import dlac
from tests.lakehouses.write import launched_spec, specs

ARCHIVES = sorted((Path(__file__).parents[1] / "lakehouses").glob("*.tar.xz"))
assert ARCHIVES, "the kept lakehouses belong to the checkout"
RUNS = {"launched", "forked", "mixed", "packed", "transformed", "followed"}


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.removesuffix(".tar.xz"))
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The folder of a lakehouse that was written elsewhere."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "home"


@pytest.fixture
def arena(home: Path, monkeypatch: pytest.MonkeyPatch) -> Arena:
    """The lakehouse as an arena."""
    return Arena(home, monkeypatch)


def test_kept_runs_are_exact(arena: Arena) -> None:
    """Every run is found, its audit is exact, its kept checkpoints are whole, and the killed rank's recovery is recorded."""
    assert {each["run"] for each in list_runs(arena.lakehouse)} == RUNS
    for run in RUNS:
        report = audit_run(arena.lakehouse, run)
        assert report.exact, (run, report.to_json())
        assert list_checkpoints(arena.lakehouse, run)
        assert [each.problem for each in verify_checkpoints(arena.lakehouse, run) if each.problem] == []
    recovered = [each for each in recoveries_of(arena.lakehouse) if each.run == "launched"]
    assert [(each.attempt, each.outcome) for each in recovered] == [(2, "resumed")]
    kinds = {row.kind for row in Ledger(arena.lakehouse).rows("launched")}
    assert kinds >= {"rewind", "claim", "checkpoint", "advance"}


def test_own_rows_equal_pyiceberg_rows(arena: Arena) -> None:
    """Own tables are read without pyiceberg's scan: files without newer columns, some columns, one run, some kinds."""
    kinds = among("kind", ["claim", "checkpoint"])
    filters: dict[str, list[BooleanExpression]] = {name: [AlwaysTrue()] for name in TABLES}
    filters["consumption"] += [equals("run", "launched"), And(equals("run", "mixed"), kinds)]
    filters["consumption"] += [And(kinds, more_than("seq", 3)), equals("run", "none")]
    for name, row_filter in ((name, each) for name, wanted in filters.items() for each in wanted):
        table = arena.lakehouse.own(name)
        for columns in (("*",), tuple(table.schema().column_names[:2]), ("*",)):  # at last, from known manifests
            expected = table.scan(row_filter, selected_fields=columns).to_arrow()
            found = arena.lakehouse.read_own(name, row_filter, columns=columns)
            # small files have no copy of Arrow's schema, so pyiceberg reads other types of string and list
            assert found.equals(expected.cast(found.schema)), (name, row_filter)
            assert (found.num_rows > 0) == (row_filter != equals("run", "none") and name != "row_keys")


def test_kept_views_answer(home: Path) -> None:
    """`dlac sql` shows the checkpoints of the surviving lineage. `dlac checkpoint identify` recognizes the export."""
    lineage = dlac("sql", "SELECT step FROM lineage WHERE run = 'launched' ORDER BY step", "--json", home=home)
    assert lineage.returncode == 0, lineage.stderr
    assert [row["step"] for row in json.loads(lineage.stdout)] == [5, 10, 15]
    whose = dlac("checkpoint", "identify", str(home / "weights.safetensors"), home=home)
    assert whose.returncode == 0, whose.stderr
    assert "launched" in whose.stdout


@pytest.mark.slow
def test_kept_checkpoint_is_rehearsed(home: Path) -> None:
    """The steps after a checkpoint have the recorded losses, up to differences between processors."""
    done = dlac("rehearse", "launched", "--json", home=home)
    assert done.stdout, done.stderr
    steps = json.loads(done.stdout)["steps"]
    assert steps
    for step in steps:
        assert step["replayed"] == pytest.approx(step["recorded"], rel=1e-5)


@pytest.mark.parametrize(
    "run",
    [
        *("packed", pytest.param("mixed", marks=pytest.mark.slow)),
        *(pytest.param(run, marks=pytest.mark.soak) for run in ("transformed", "followed")),
    ],
)
def test_kept_run_resumes_exactly(home: Path, run: str) -> None:
    """Each run resumes after its last checkpoint, reaches its end, and is exact. `followed` has new rows to read."""
    shop = Workshop(home)
    before = {row.checkpoint_id for row in Ledger(shop.lakehouse).rows(run, kinds=(CheckpointRow,))}
    shop.table("src.f", 240, 60)
    shop.train(specs(home)[run])
    report = audit_run(shop.lakehouse, run)
    assert report.exact, report.to_json()
    rows = Ledger(shop.lakehouse).rows(run, kinds=(CheckpointRow,))
    assert before < {row.checkpoint_id for row in rows}
    assert next(row.parent for row in rows if row.checkpoint_id not in before) in before


@pytest.mark.slow
def test_kept_launch_resumes_exactly(arena: Arena) -> None:
    """Two ranks train the rewound run to its end, without the rows that the rewind excluded."""
    launch = arena.launch(launched_spec(arena))
    try:
        assert launch.wait() == 0, launch.stderr
    finally:
        arena.close()
    report = audit_run(arena.lakehouse, "launched")
    assert report.exact, report.to_json()
    assert max(row for step, rows in arena.journal("launched").items() if step > 15 for row in rows) < 390
