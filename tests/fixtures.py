"""What tests share: two trained runs, ways to tamper with what they left, tables of the PyTorch dataset, a Dagster instance."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.cli import main
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.plan.legs.choice import first_leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.read.opening.open_leg import OpenLeg, open_leg
from dlac_pipeline.spec.job_spec import JobSpec, OrderSpec, SourceSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.supervisor import Supervisor
from tests.conftest import Arena
from tests.empty_lakehouse import empty_lakehouse
from tests.integration.audit_runs import Forgery, Workshop
from tests.integration.datasets import Datasets

if TYPE_CHECKING:
    import dagster as dg

    from tests.seaweedfs import SeaweedFS

PROGRAM = Path(__file__).parent / "programs" / "train_tiny.py"
ROWS = 1000


@dataclass
class Lake(Forgery):
    """A lakehouse with two finished runs of one plan: "reference", and "faulty", one of whose ranks was killed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.home / "journal").mkdir()
        random = np.random.default_rng(0)
        x = pa.array(list(random.normal(size=(ROWS, 4)).astype(np.float32)), type=pa.list_(pa.float32()))
        rows = pa.table({"row_id": pa.array(np.arange(ROWS)), "x": x, "kept": pa.array(random.random(ROWS) < 0.9)})
        self.lakehouse.catalog.create_table("src.t", rows.schema, properties={"write.parquet.row-group-limit": "50"})
        for start in (0, 300, 650):
            self.lakehouse.load("src.t").append(rows.slice(start, {0: 300, 300: 350, 650: 350}[start]))

    def spec(self, run: str, pause_s: float = 0.02) -> JobSpec:
        """A job with dead rows here and there, and one row group without any live row."""
        raw = {
            "run": run,
            "source": {"table": "src.t", "columns": ["row_id", "x"], "row_filter": "kept = true and row_id >= 60"},
            "order": {"batch_size": 32, "key_groups": 8, "seed": 3, "passes": 2},
            "checkpoint": {"every_steps": 8},
            "launch": {"script": str(PROGRAM), "world_size": 2},
            "params": {"journal": str(self.home / "journal"), "pause_s": str(pause_s)},
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
        for row in Ledger(self.lakehouse).rows(run, kinds=(CheckpointRow,)):
            for step in range(len(steps) + 1, row.step + 1):
                steps[step] = written[row.attempt, step]
        return steps


class Command:
    """The `dlac` command in this process, which spares its start."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run it, on the lakehouse in `home`."""
        command = ["dlac", *arguments, *(() if home is None else ("--home", str(home)))]
        self._monkeypatch.setattr(sys, "argv", command)
        with pytest.raises(SystemExit) as ended:
            main.main()
        said = self._capsys.readouterr()
        assert isinstance(ended.value.code, int | None)
        return subprocess.CompletedProcess(command, ended.value.code or 0, said.out, said.err)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """`dlac`, as a function: an error that is not caught fails the test."""
    return Command(monkeypatch, capsys)


@pytest.fixture(scope="session")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """The lakehouse of this module; tests add forged runs to it."""
    made = Lake(tmp_path_factory.mktemp("audit") / "home")
    pids: list[int] = []

    def kill_a_rank(event: Event) -> None:
        if event["event"] == "attempt" and not pids:
            pids.extend(event["pids"])
        if event["event"] == "checkpoint" and event["attempt"] == 1 and event["step"] == 24:
            os.kill(pids[1], signal.SIGKILL)

    assert Supervisor(Request(spec=made.spec("reference"))).run().attempts == 1
    faulty = made.spec("faulty", pause_s=0.1)  # the rank is dead before the next checkpoint, on a busy machine too
    assert Supervisor(Request(spec=faulty), on_event=kill_a_rank).run().attempts == 2
    return made


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The lakehouse of runs of every kind, before any of them."""
    return Workshop(tmp_path_factory.mktemp("workshop") / "home")


@pytest.fixture(scope="session")
def audit(lake: Lake) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection over the lakehouse before anything was forged in it."""
    with open_audit(lake.lakehouse) as connection:
        lake.row_ids(connection, "t")
        yield connection


@pytest.fixture(scope="session")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> Datasets:
    """The tables that datasets are opened over. A test that changes a table makes another one."""
    return Datasets(tmp_path_factory.mktemp("datasets") / "home")


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """A Dagster instance of this test's own."""
    import dagster as dg  # which most tests do without

    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster"), overrides={"telemetry": {"enabled": False}}) as made:
        yield made


@pytest.fixture
def lakehouse(tmp_path: Path) -> Lakehouse:
    """An empty lakehouse of this test's own."""
    return empty_lakehouse(tmp_path / "home")


@pytest.fixture
def opened(arena: Arena) -> OpenLeg:
    """An open leg over many small appends, whose last batch is not full."""
    arena.table(appends=(3, 1, 7, 110, 2, 14), row_group_rows=20)
    plan = make_plan(arena.lakehouse, SourceSpec(table="src.t", columns=["row_id", "x"]))
    order = OrderSpec(batch_size=24, key_groups=6, block_slices=2, seed=11, passes=2)
    spec = arena.spec("r").model_copy(update={"order": order})
    return open_leg(Plans(arena.lakehouse), first_leg(spec, [plan]), spec)


@pytest.fixture
def spec(arena: Arena) -> JobSpec:
    """A run of 15 steps with a checkpoint every 5, trained in this process."""
    arena.table(appends=(70, 50), row_group_rows=20)
    return arena.spec("r1", world_size=1, batch_size=16, key_groups=4, every_steps=5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    """Catalog and store of the tests of a module."""
    from tests.seaweedfs import seaweedfs  # which most tests do without

    with seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as running:
        yield running


@pytest.fixture
def home(arena: Arena) -> Path:
    """The arena's folder, as $DLAC_HOME."""
    arena.monkeypatch.setenv("DLAC_HOME", str(arena.home))
    return arena.home
