"""Fixtures and helpers of all tests: a lakehouse in a folder, source tables, job specs, training, launches and journals."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import HealthCheck, settings
from pydantic import BaseModel
from pyiceberg.table import Table

import dlac_pipeline as dlac
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import trained_by
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, ClaimRow, LedgerRow
from dlac_pipeline.spec.job_spec import CheckpointSpec, JobSpec, OrderSpec, SourceSpec, parse_spec
from dlac_pipeline.spec.launch_spec import LaunchSpec
from tests.empty_lakehouse import make_empty_lakehouse
from tests.forked import fork_the_fork_server
from tests.launches import Launch, wait_until

pytest_plugins = ("tests.fixtures", "tests.isolation")
__all__ = ["Launch", "wait_until"]  # test modules import them from here
os.environ["DLAC_RENDEZVOUS_KEY"] = "a secret of the tests' nodes"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for what it starts in the background

if TYPE_CHECKING:
    from tests.object_store import Network, ObjectStore  # imports this module

settings.register_profile("noisy nodes", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("new examples", settings.get_profile("noisy nodes"), derandomize=False)
settings.load_profile("noisy nodes")  # the same examples each time; `--hypothesis-profile "new examples"` draws others
PROGRAMS = Path(__file__).parent / "programs"
RECORDED_SQL = Path(__file__).with_name("recorded.sql").read_text()
R = TypeVar("R", bound=LedgerRow)
Steps = dict[int, list[int]]
"""Optimizer step -> row ids of its global batch, in slot order."""


def pytest_configure() -> None:
    """Fork the fork servers of this process. A benchmark that imports this module measures real ones."""
    fork_the_fork_server()


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: each looks at half a million objects otherwise."""
    gc.collect()
    gc.freeze()


@dataclass
class Arena:
    """A lakehouse in a folder, and the runs in it."""

    home: Path
    monkeypatch: pytest.MonkeyPatch
    config: LakehouseConfig = field(default_factory=LakehouseConfig)
    places: dict[str, Any] = field(default_factory=dict)
    """Settings of `checkpoint` in every spec, such as an object store's."""
    lakehouse: Lakehouse = field(init=False)
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.config == LakehouseConfig() and not (self.home / "catalog.db").exists():
            make_empty_lakehouse(self.home)
        self.lakehouse = connect(self.config.at_home(self.home))
        self.lakehouse.create_namespace("src")
        (self.home / "journal").mkdir(exist_ok=True)

    def table(self, name: str = "src.t", *, appends: tuple[int, ...] = (500,) * 4, row_group_rows: int = 50) -> Table:
        """Make a table of (row_id, x, even, name) with one data file per append."""
        rows = source_rows(0, sum(appends))
        self.lakehouse.catalog.create_table(
            name, rows.schema, properties={"write.parquet.row-group-limit": str(row_group_rows)}
        )
        start = 0
        for count in appends:
            self.lakehouse.load(name).append(rows.slice(start, count))
            start += count
        return self.lakehouse.load(name)

    def spec(self, run: str, program: str = "train_tiny.py", **changes: Any) -> JobSpec:
        """Return a job spec. `changes` are fields of any of its sections, or params."""
        sections: dict[str, dict[str, Any]] = {
            "source": {"table": "src.t", "columns": ["row_id", "x"]},
            "order": {"batch_size": 32, "key_groups": 8, "seed": 3, "passes": 2},
            "checkpoint": {"every_steps": 10, "memory": "", **self.places},
            "launch": {"script": str(PROGRAMS / program), "world_size": 2},
        }
        params = {"journal": str(self.home / "journal"), "run": run}
        for name, value in changes.items():
            homes = [key for key, model in _SECTIONS.items() if name in model.model_fields]
            if homes:
                sections[homes[0]][name] = value
            else:
                params[name] = str(value)
        raw = {"run": run, "lakehouse": self.config.model_dump(), **sections, "params": params}
        return parse_spec(raw, origin="the test").resolved(self.home)

    def program(self, name: str) -> Path:
        """Return one of the tests' training scripts."""
        return PROGRAMS / name

    @contextmanager
    def training_run(self, spec: JobSpec, **options: Any) -> Iterator[dlac.TrainingRun]:
        """Open a run of one rank in this process, from a spec file in the home folder."""
        path = self.home / f"{spec.run}.yaml"
        path.write_text(yaml.safe_dump(spec.model_dump(mode="json")))
        self.monkeypatch.setenv("DLAC_HOME", str(self.home))
        with dlac.training_run(path, **options) as run:
            yield run

    def train(self, spec: JobSpec, *, until: int | None = None, sharded: bool = False) -> Steps:
        """Train in this process with one rank, or its engine for shards. The process "dies" in the step `until`."""
        seen: Steps = {}
        with self.training_run(spec) as run:
            model = torch.nn.Linear(4, 1)
            optimizer = torch.optim.AdamW(model.parameters())
            run.restore(
                dlac.DistributedState(model=model, optimizer=optimizer) if sharded else dlac.TorchState(model=model)
            )
            for batch in run.batches():
                if batch.step == until:
                    return seen
                seen[batch.step] = batch["row_id"][batch.valid].tolist()
                run.step_done(batch.mean(batch["x"].sum(-1)))
        return seen

    def trained(self, run: str, *, until: int | None = None, **changes: Any) -> JobSpec:
        """Return the spec of a new job that was trained so in this process."""
        spec = self.spec(run, **changes)
        self.train(spec, until=until)
        return spec

    def launch(self, spec: JobSpec, *, under: Sequence[str] = (), **request: Any) -> Launch:
        """Start a supervisor process for this spec. `under` is a command that runs another one."""
        log = self.home / f"supervisor-{len(self.launches)}.jsonl"
        self.launches.append(Launch({"spec": spec.model_dump(mode="json"), **request}, log, under))
        return self.launches[-1]

    def launched(self, spec: JobSpec, **options: Any) -> Launch:
        """Launch this spec, and wait for its success."""
        launch = self.launch(spec, **options)
        assert launch.wait() == 0, launch.stderr
        return launch

    def close(self) -> None:
        """End the remaining launches."""
        for launch in self.launches:
            launch.destroy()

    @overload
    def rows(self, run: str) -> list[LedgerRow]: ...
    @overload
    def rows(self, run: str, *kinds: type[R]) -> list[R]: ...
    def rows(self, run: str, *kinds: type[LedgerRow]) -> Sequence[LedgerRow]:
        """Return the run's ledger rows."""
        return Ledger(self.lakehouse).rows(run, kinds=kinds)

    def head(self, run: str) -> str | None:
        """Return the run's head."""
        return Ledger(self.lakehouse).state(run).fence.head

    def lineage(self, run: str, head: str | None = None) -> list[CheckpointRow]:
        """Return the surviving checkpoints, oldest first, or another head's lineage."""
        checkpoints = {row.checkpoint_id: row for row in self.rows(run, CheckpointRow)}
        chain, head = [], head or self.head(run)
        while head is not None:
            chain.append(checkpoints[head])
            head = checkpoints[head].parent
        return chain[::-1]

    def losses(self, run: str, head: str | None = None) -> list[float]:
        """Return the loss of every step on the surviving lineage, or on another head's."""
        return [loss for row in self.lineage(run, head) for loss in row.losses]

    def entries(self, run: str) -> list[dict[str, Any]]:
        """Return the journal of the training function: attempt, step, rank, rows and loss, without incomplete lines."""
        paths = (self.home / "journal").glob(f"{run}-*-*.jsonl")
        lines = [line for path in paths for line in path.read_text().splitlines(keepends=True)]
        found = [json.loads(line) for line in lines if line.endswith("\n")]
        return [entry for entry in found if entry["run"] == run]

    def recorded(self, run: str, head: str | None = None) -> Steps:
        """Return the row ids in the ledger's advances, by the step of each surviving checkpoint. Only SQL is used."""
        lineage = {row.checkpoint_id for row in self.lineage(run, head)}
        advances = [row for row in self.rows(run, AdvanceRow) if row.checkpoint_id in lineage]
        names = ("step", "plan_id", "cut_id", "key_group", "block", "position_start", "position_end")
        tables = {name: self.lakehouse.own(name).scan().to_arrow() for name in ("plans", "work_units", "slices")}
        paths = sorted(set(tables["work_units"]["file_path"].to_pylist()))
        files = self.lakehouse.own("plans").io
        found = {path: pq.ParquetFile(files.new_input(path).open()) for path in paths}
        parts = [
            (ids := file.read(["row_id"])).append_column("file_path", pa.array([path] * len(ids)))
            for path, file in found.items()
            if "row_id" in file.schema_arrow.names  # a campaign has other tables, too
        ]
        rows = [part.append_column("at", pa.array(range(len(part)))) for part in parts]
        tables["advances"] = pa.table({name: pa.array([getattr(row, name) for row in advances]) for name in names})
        tables["data"] = pa.concat_tables(rows)
        steps: Steps = {}
        with duckdb.connect() as connection:
            for name, table in tables.items():
                connection.register(name, table)
            for step, row_id in connection.execute(RECORDED_SQL).fetchall():
                steps.setdefault(step, []).append(row_id)
        return steps

    def journal(self, run: str, head: str | None = None) -> Steps:
        """Return the training function's journal of every step on the surviving lineage, or on another head's."""
        written: dict[tuple[int, int], dict[int, dict[str, Any]]] = {}
        for entry in self.entries(run):
            written.setdefault((entry["attempt"], entry["step"]), {})[entry["rank"]] = entry
        steps: Steps = {}
        last, claims = 0, self.rows(run, ClaimRow)
        for row in self.lineage(run, head):
            for step in range(last + 1, row.step + 1):
                trained = trained_by(claims, row.attempt, step)
                sizes = [(each.memory_ranks, each.memory_readers) for each in claims if each.memory_of == trained]
                if not sizes or trained == row.attempt:
                    sizes = [(row.world_size, row.readers)]
                (expected, readers), ranks = sizes[0], written[trained, step]
                assert sorted(ranks) == list(range(expected)), f"step {step}: ranks {sorted(ranks)} wrote"
                shares: dict[int, list[int]] = {}
                for rank, entry in sorted(ranks.items()):
                    if not entry["rows"]:  # a stage in the middle of a pipeline
                        continue
                    share = entry.get("reader", rank) if readers else rank  # kept journals have none
                    assert entry["rows"] == shares.setdefault(share, entry["rows"]), f"step {step}: rank {rank} differs"
                steps[step] = [row_id for share in sorted(shares) for row_id in shares[share]]
            last = row.step
        return steps


def source_rows(start: int, count: int) -> pa.Table:
    """Return rows start .. start+count-1 of the source. x is a function of row_id."""
    ids = np.arange(start, start + count)
    x = np.sin(ids[:, None] * np.array([1.0, 2.0, 3.0, 4.0])).astype(np.float32)
    names, vectors = pa.array([f"row {row_id}" for row_id in ids]), pa.array(list(x), type=pa.list_(pa.float32()))
    return pa.table({"row_id": pa.array(ids), "x": vectors, "even": pa.array(ids % 2 == 0), "name": names})


_SECTIONS: dict[str, type[BaseModel]] = {
    **{"source": SourceSpec, "order": OrderSpec, "checkpoint": CheckpointSpec, "launch": LaunchSpec},
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedule the tests of a group in one process, with `--dist loadgroup`."""
    if config.getoption("dist") != "loadgroup":
        return None
    from tests.scheduling import GroupScheduling  # which needs xdist

    return GroupScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the shared lakehouse of the fault tests be on real servers."""
    parser.addoption("--lakehouse", default="embedded", choices=("embedded", "seaweedfs", "postgres"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Check that no test has a soak mark if some of its parameters have one: it would mark all of them."""
    for item in items:
        values = [value for mark in item.iter_markers("parametrize") for value in mark.args[1]]
        some = any(mark.name == "soak" for value in values for mark in getattr(value, "marks", ()))
        if some and len(list(item.iter_markers("soak"))) > 1:
            raise pytest.UsageError(
                f"expected a soak mark on {item.nodeid} or on some of its parameters, found both: drop one of them"
            )


@pytest.fixture
def arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """An empty lakehouse for this test."""
    arena = Arena(tmp_path / "home", monkeypatch)
    yield arena
    arena.close()


@pytest.fixture(scope="session")
def campaign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Arena]:
    """A lakehouse shared by the runs of many tests, with an undisturbed, finished run named "reference"."""
    from tests.served_lakehouses import served_lakehouse

    kind = request.config.getoption("lakehouse")
    with pytest.MonkeyPatch.context() as monkeypatch, ExitStack() as servers:
        config, places = LakehouseConfig(), {}
        if kind != "embedded":
            served = servers.enter_context(served_lakehouse(kind, tmp_path_factory.mktemp("served")))
            config, places = served.config, served.store
        arena = Arena(tmp_path_factory.mktemp("campaign"), monkeypatch, config, places)
        arena.table()
        arena.launched(arena.spec("reference"))
        yield arena
        arena.close()


@pytest.fixture
def store() -> Iterator[ObjectStore]:
    """A running S3 server with an empty bucket."""
    from tests.object_store import object_store

    with object_store() as running:
        yield running


@pytest.fixture
def network(store: ObjectStore) -> Iterator[Network]:
    """The network between training and the server."""
    from tests.object_store import Network

    link = Network(store.port)
    yield link
    link.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)
