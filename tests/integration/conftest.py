"""What the audit's tests share: two trained runs, and ways to tamper with what they left."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.io.pyarrow import schema_to_pyarrow

from catalog.connect import Lakehouse, LakehouseConfig, connect
from catalog.ledger import Ledger, Row
from catalog.schemas import CONSUMPTION, SLICES
from dlac_pipeline.audit.audit import AuditReport, audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit
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

    assert Supervisor(made.spec("reference")).run().attempts == 1
    assert Supervisor(made.spec("faulty"), on_event=kill_a_rank).run().attempts == 2
    return made


@pytest.fixture(scope="session")
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
