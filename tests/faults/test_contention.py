"""Several processes at one ledger at the worst moments. The rows show whether the invariants hold."""

import json
import signal
import sqlite3
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import dlac_pipeline as dlac
import dlac_pipeline.lakehouse.retrying
from dlac_pipeline.extensions.upkeep.upkeep import MIN_FILES, run_upkeep
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import fence_of_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, LedgerRow
from tests.conftest import Arena, wait_until
from tests.forked import Forked
from tests.postgres_server import needs_postgres, postgres
from tests.snapshots import check_readable

PROGRAM = Path(__file__).parents[1] / "programs" / "ledger_process.py"
Start = Callable[..., "Process"]


class Process:
    """A process of `ledger_process.py`."""

    def __init__(self, role: str, *, catalog: str = "", **request: Any) -> None:
        command = [sys.executable, str(PROGRAM), role, json.dumps(request)]
        root = str(PROGRAM.parents[2])
        output: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.process = Forked(command, cwd=root, env={"PYTHONPATH": root, "CATALOG": catalog}, **output)

    def end(self, status: int = 0) -> list[dict[str, Any]]:
        """Wait for its end, and return its output."""
        output, errors = self.process.communicate(timeout=240)
        assert self.process.returncode == status, errors + output[-1000:]
        return [json.loads(line) for line in output.splitlines()]


@pytest.fixture
def start() -> Iterator[Start]:
    """Yield a function that starts processes. The remaining ones are killed."""
    started: list[Process] = []

    def begin(role: str, **request: Any) -> Process:
        started.append(Process(role, **request))
        return started[-1]

    yield begin
    for each in started:
        each.process.kill()
        each.process.communicate()


def check_ledger(lakehouse: Lakehouse) -> dict[str, list[LedgerRow]]:
    """Check the invariants of every run from its rows alone, and compare the rows with the cached fence."""
    ledger = Ledger(lakehouse)
    found = {run: ledger.rows(run) for run in ledger.runs()}
    for run, rows in found.items():
        appends: dict[int, list[LedgerRow]] = defaultdict(list)
        for row in rows:
            appends[row.seq].append(row)
        assert list(appends) == list(range(1, len(appends) + 1)), f"{run}: seq grows by one, without a gap"
        head, attempt, successors = None, 0, set[tuple[str | None, int]]()
        for seq, each in appends.items():
            assert len({(row.attempt, row.nonce, row.head_after) for row in each}) == 1, f"{run}: append {seq}"
            assert each[0].attempt >= attempt, f"{run}: a stale attempt appended {seq}"
            assert (each[0].attempt > attempt) == (each[0].kind == "claim"), f"{run}: append {seq}"
            attempt = each[0].attempt
            checkpoints = [row for row in each if isinstance(row, CheckpointRow)]
            assert len(checkpoints) <= 1
            for row in checkpoints:
                assert row.parent == head, f"{run}: the chain of heads is broken at {seq}"
                assert (row.parent, attempt) not in successors, f"{run}: two successors of {row.parent}"
                successors.add((row.parent, attempt))
                head = row.checkpoint_id
            assert each[0].head_after == head, f"{run}: append {seq} moves the head without a reason"
        assert ledger.state(run).fence == fence_of_rows(rows)
    check_readable(lakehouse)
    return found


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=[pytest.mark.soak, *needs_postgres])])
def catalog_uri(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a catalog. An empty one is an SQLite file in the home folder."""
    if request.param == "sqlite":
        yield ""
        return
    with postgres() as address:
        yield address


@pytest.mark.soak
def test_runs_commit_while_upkeep_never_stops(tmp_path: Path, start: Start, catalog_uri: str) -> None:
    """Three runs and endless upkeep share one ledger. Every acknowledged row is present once, in order and whole."""
    home, stop = str(tmp_path / "home"), tmp_path / "stop"
    lakehouse = connect(LakehouseConfig(uri=catalog_uri).at_home(tmp_path / "home"))
    keeper = start("upkeep", catalog=catalog_uri, home=home, stop=str(stop))
    committers = {
        run: start("commit", catalog=catalog_uri, home=home, run=run, commits=20, finishes=run == "a") for run in "abc"
    }
    output = {run: process.end() for run, process in committers.items()}
    stop.touch()
    assert sum(each["removed"] for each in keeper.end()) > 0
    run_upkeep(lakehouse, keep=2)
    found = check_ledger(lakehouse)
    assert found.keys() == set("abc")
    for run, lines in output.items():
        answered = [line["committed"] for line in lines if "committed" in line]
        assert [row.checkpoint_id for row in found[run] if isinstance(row, CheckpointRow)] == answered
        advances = [(row.checkpoint_id, row.key_group) for row in found[run] if isinstance(row, AdvanceRow)]
        assert advances == [(name, group) for name in answered for group in range(2)]
    assert len(list(lakehouse.own("consumption").scan().plan_files())) < 3 * MIN_FILES


@pytest.mark.slow
def test_first_commits_race_to_make_tables(tmp_path: Path, start: Start) -> None:
    """In an empty lakehouse all processes repeatedly make the same ledger, and none loses its rows."""
    times, runs = 2, ("a", "b", "c")
    for each in range(times):
        (tmp_path / f"{each}").mkdir()
    racers = [start("first", home=str(tmp_path), run=run, times=times, processes=len(runs)) for run in runs]
    tables = [[line["table"] for line in racer.end() if "table" in line] for racer in racers]
    assert tables[0] == tables[1] == tables[2]
    for each in range(times):
        found = check_ledger(connect(LakehouseConfig().at_home(tmp_path / f"{each}" / "home")))
        assert {run: len(rows) for run, rows in found.items()} == dict.fromkeys(runs, 4)


@pytest.mark.parametrize(
    "interruption", ["a claim", pytest.param("a claim, many commits and upkeep", marks=pytest.mark.soak)]
)
def test_commit_after_claim_is_refused(tmp_path: Path, start: Start, interruption: str) -> None:
    """A commit is prepared and delayed while a recovery claims the run. It is refused, and leaves nothing."""
    lakehouse = connect(LakehouseConfig().at_home(tmp_path / "home"))
    ledger = Ledger(lakehouse)
    claim(ledger, "r", nonce="n1", replaces=0)
    rows = [CheckpointRow(checkpoint_id="r-1-n1")]
    commit_checkpoint(ledger, Attempt(run="r", number=1, nonce="n1"), checkpoint_id="r-1-n1", parent=None, rows=rows)
    late = start("delayed", home=str(tmp_path / "home"), run="r", nonce="n1")
    process = psutil.Process(late.process.pid)
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, what="the commit to stand still")
    claim(ledger, "r", nonce="n2", replaces=1)
    if interruption != "a claim":
        start("commit", home=str(tmp_path / "home"), run="other", commits=25).end()
        run_upkeep(lakehouse, keep=1)
    before = ledger.rows("r")
    process.send_signal(signal.SIGCONT)
    (output,) = late.end(status=80)
    assert output["error"] == "Fenced"
    assert "owned by attempt 2" in output["message"]
    assert ledger.rows("r") == before
    check_ledger(lakehouse)


def test_catalog_outage_costs_no_checkpoint(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog refuses all clients during an attempt's first and a later commit. Both are committed once."""
    arena.table(appends=(300, 300))
    database = arena.home / "catalog.db"
    impatient = arena.lakehouse.config.model_copy(update={"uri": f"sqlite:///{database}?timeout=0.1"})
    spec = arena.spec("r", world_size=1, passes=1).model_copy(update={"lakehouse": impatient})
    locker = sqlite3.connect(database, isolation_level=None, timeout=60)
    refused: list[str] = []

    def pause_briefly(state: Any, **limits: float) -> float:
        refused.append(str(state.outcome.exception()))
        if len(refused) % 3 == 0:
            locker.execute("ROLLBACK")
        return 0.0

    monkeypatch.setattr(dlac_pipeline.lakehouse.retrying, "pause_s", pause_briefly)
    with closing(locker), arena.training_run(spec) as run:
        run.restore(dlac.TorchState(model=torch.nn.Linear(1, 1)))
        for batch in run.batches():
            if batch.step in (10, 19):
                locker.execute("BEGIN EXCLUSIVE")
            run.step_done(0.0)
    assert len(refused) == 6
    assert all("database is locked" in each for each in refused)
    assert [row.step for row in arena.rows("r", CheckpointRow)] == [10, 19]
    assert sorted(row for rows in arena.recorded("r").values() for row in rows) == list(range(600))
    check_ledger(arena.lakehouse)
