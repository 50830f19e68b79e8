"""Runs for the audit to look at: of every kind, trained in this process, and forged ones."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
import torch
import yaml
from pyiceberg.expressions import EqualTo
from pyiceberg.io.pyarrow import schema_to_pyarrow

import dlac_pipeline as dlac
from dlac_pipeline.audit.audit import AuditReport, audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit, rows_of
from dlac_pipeline.extensions.erasure.explain import explain_sql
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.schemas import CONSUMPTION, SLICES
from dlac_pipeline.lakehouse.ledger.typed_rows import Columns

Change = Callable[[list[Columns]], list[Columns]]


@dataclass
class Forgery:
    """A lakehouse in a folder, and ways to tamper with what runs left in it."""

    home: Path
    lakehouse: Lakehouse = field(init=False)
    names: Iterator[int] = field(default_factory=count)

    def __post_init__(self) -> None:
        self.lakehouse = connect(LakehouseConfig().at_home(self.home))
        self.lakehouse.create_namespace("src")

    def row_ids(self, connection: duckdb.DuckDBPyConnection, *tables: str) -> None:
        """Make the table source_rows(file, file_row, row_id) from the data files of these tables."""
        paths = [f"{self.home}/warehouse/src/{table}/data/*.parquet" for table in tables]
        connection.execute(
            "CREATE OR REPLACE TABLE source_rows AS SELECT filename AS file, file_row_number AS file_row, row_id "
            f"FROM read_parquet({paths!r}, filename = true, file_row_number = true)"
        )

    def forge(self, change: Change, *, of: str = "faulty", slices: Change | None = None) -> str:
        """Record a run whose ledger rows are another run's after `change`. `slices` changes its first cut. Return its name."""
        return self.forge_each([(of, change, slices)])[0]

    def forge_each(self, forgeries: Sequence[tuple[str, Change, Change | None]]) -> list[str]:
        """Forge a run for each (run, change, change of its first cut), in one append to each table. Returns their names."""
        names, ledger, cuts = [], [], []
        for of, change, slices in forgeries:
            names.append(f"forged{next(self.names)}")
            rows, cut = self.forged(names[-1], of, change, slices)
            ledger += rows
            cuts += cut
        if cuts:
            self.append_rows("slices", cuts)
        self.append_rows("consumption", ledger)
        return names

    def forged(self, name: str, of: str, change: Change, slices: Change | None) -> tuple[list[Columns], list[Columns]]:
        """Return the ledger rows of a forged run, and the rows of its cut."""

        def renamed(value: str | None) -> str | None:
            return None if value is None else f"{name}:{value}"

        consumption = self.lakehouse.own("consumption").scan(row_filter=EqualTo("run", of))  # type: ignore[call-arg,arg-type]  # as below
        rows = consumption.to_arrow().sort_by("seq").to_pylist()
        cut: list[Columns] = []
        if slices is not None:
            cut_id = rows_named(rows, "advance")[0]["cut_id"]
            cut = self.lakehouse.own("slices").scan(row_filter=EqualTo("cut_id", cut_id)).to_arrow().to_pylist()  # type: ignore[call-arg,arg-type]  # pydantic hides the real signature
            cut = [{**row, "cut_id": renamed(cut_id)} for row in slices(cut)]
            rows = [{**row, "cut_id": renamed(cut_id) if row["cut_id"] == cut_id else row["cut_id"]} for row in rows]
        ids = ("checkpoint_id", "parent", "head_after")
        return [{**row, "run": name, **{key: renamed(row[key]) for key in ids}} for row in change(rows)], cut

    def append_rows(self, table: str, rows: list[Columns]) -> None:
        """Append rows to one of DLAC's tables without DLAC."""
        schema = schema_to_pyarrow({"slices": SLICES, "consumption": CONSUMPTION}[table], include_field_ids=False)
        self.lakehouse.own(table).append(pa.Table.from_pylist(rows, schema=schema))

    def audit_forged(self, change: Change, *, of: str = "faulty", slices: Change | None = None) -> AuditReport:
        """The audit of a forged run."""
        return audit_run(self.lakehouse, self.forge(change, of=of, slices=slices))

    def problems_of_each(self, forgeries: Sequence[tuple[str, Change, Change | None]]) -> list[list[str]]:
        """Forge a run for each (run, change, change of its first cut). Returns the problems of each, from one audit of all."""
        names = self.forge_each(forgeries)
        with open_audit(self.lakehouse) as connection:
            found = rows_of(connection, "SELECT run, problem FROM problems WHERE run IN (SELECT unnest($1))", [names])
        return [[row["problem"] or "" for row in found if row["run"] == name] for name in names]


TRANSFORM = '''
import pyarrow as pa

def some(batch):
    """Leave out every third row, refuse every fiftieth, and make two of every fifth."""
    ids = batch["row_id"].to_pylist()
    if any(i % 50 == 7 for i in ids):
        raise ValueError("not this one")
    return batch.take(pa.array([k for k, i in enumerate(ids) for _ in range(0 if i % 3 == 0 else 1 + (i % 5 == 0))], pa.int64()))
'''


def tokens_of(row_id: int) -> int:
    """Tokens of a document: none, some, or more than many sequences hold."""
    return 300 if row_id % 97 == 5 else row_id * 7919 % 40


@dataclass
class Workshop(Forgery):
    """A lakehouse in which runs of every kind are trained, each alone and in this process."""

    seen: dict[str, dict[int, Counter[int]]] = field(default_factory=dict)
    """Run -> step -> row id -> how often it, or a token of it, was in a valid slot: evidence that is not DLAC's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        (self.home / "some.py").write_text(TRANSFORM)

    def table(self, name: str, first: int, rows: int) -> None:
        """Append rows first .. first+rows-1 to a table, made if it is not there. Every token of a row is its id + 1."""
        ids = range(first, first + rows)
        tokens = pa.array([[row_id + 1] * tokens_of(row_id) for row_id in ids], pa.list_(pa.int32()))
        odd = pa.array([row_id % 2 == 1 for row_id in ids])
        made = pa.table({"row_id": pa.array(ids, pa.int64()), "odd": odd, "tokens": tokens})
        if not self.lakehouse.catalog.table_exists(name):
            self.lakehouse.catalog.create_table(name, made.schema, properties={"write.parquet.row-group-limit": "25"})
        self.lakehouse.load(name).append(made)

    def train(self, spec: dict[str, Any], *, until: int | None = None, skip: Sequence[int] = ()) -> None:
        """Train; `until` is the step in whose middle the process "dies", `skip` are steps that the engine does not apply."""
        fixed = {"launch": {"script": "x.py", "new_leg": True}, "checkpoint": {"every_steps": 4}}
        path = self.home / f"{spec['run']}.yaml"
        path.write_text(yaml.safe_dump({**fixed, **spec}))
        seen = self.seen.setdefault(spec["run"], {})
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("DLAC_HOME", str(self.home))
            with dlac.training_run(path) as run:
                run.restore(dlac.TorchState(model=torch.nn.Linear(2, 1)))
                for batch in run.batches():
                    if batch.step == until:
                        return
                    packed = "tokens" in batch.tensors
                    ids = batch["tokens"][batch["document"] > 0] - 1 if packed else batch["row_id"][batch.valid]
                    seen[batch.step] = Counter(ids.tolist())
                    run.step_done(0.5, applied=batch.step not in skip)

    def seen_until(self, run: str, step: int) -> Counter[int]:
        """Row id -> how often it, or a token of it, was seen in the steps up to one."""
        total: Counter[int] = Counter()
        for each in range(1, step + 1):
            total.update(self.seen[run][each])
        return total


def _source(table: str, *columns: str, **more: Any) -> dict[str, Any]:
    return {"table": table, "columns": list(columns or ("row_id",)), **more}


def _order(batch_size: int = 16, **more: Any) -> dict[str, Any]:
    return {"batch_size": batch_size, "key_groups": 4, "seed": 5, **more}


def mixed(shop: Workshop) -> None:
    """Two tables in turns, killed twice, with skipped steps; weight and batch size change in the middle."""
    shop.table("src.a", 0, 400)
    shop.table("src.b", 1000, 200)

    def train(batch_size: int, weight: float, **more: Any) -> None:
        first = _source("src.a", weight=weight, passes=2)
        second = _source("src.b", weight=0.3, passes=1, row_filter="odd = true")
        shop.train({"run": "mixed", "source": first, "mixture": [second], "order": _order(batch_size)}, **more)

    train(16, 0.7, until=15, skip=(3, 5))
    train(16, 0.7, until=30)
    train(32, 0.5, until=33)
    train(32, 0.5)


def packed(shop: Workshop) -> None:
    """Documents packed from two tables, killed twice, with skipped steps; then a larger batch, a half-read document excluded."""
    shop.table("src.da", 0, 300)
    shop.table("src.db", 1000, 150)

    def train(batch_size: int, *exclude: str, **more: Any) -> None:
        first = _source("src.da", "tokens", weight=0.7, row_filter="row_id <> 12", exclude=list(exclude))
        second = _source("src.db", "tokens", weight=0.3)
        spec = {"run": "packed", "source": first, "mixture": [second], "order": _order(batch_size)}
        shop.train({**spec, "sequences": {"length": 16}}, **more)

    train(8, until=15, skip=(2, 3, 7))
    train(8, until=30)
    train(16, until=34)
    seen = shop.seen_until("packed", 32)
    train(16, f"row_id = {min(row_id for row_id, n in seen.items() if n < tokens_of(row_id))}")


def transformed(shop: Workshop) -> None:
    """A transform leaves rows out, refuses some, and makes two samples of others."""
    shop.table("src.tr", 0, 500)
    source = _source("src.tr", transform=f"{shop.home}/some.py:some", on_reject="quarantine")
    shop.train({"run": "transformed", "source": source, "order": _order()}, until=15)
    shop.train({"run": "transformed", "source": source, "order": _order()})


def followed(shop: Workshop) -> None:
    """A table that is appended to, and from which rows read and not yet read are deleted; a tail stays pending."""
    shop.table("src.f", 0, 300)
    source = _source("src.f", follow="appends", identity_columns=["row_id"])
    spec = {"run": "followed", "source": source, "order": _order()}
    shop.train(spec, until=10)
    shop.table("src.f", 300, 130)
    shop.train(spec)
    shop.train(spec)
    shop.table("src.f", 430, 50)
    shop.lakehouse.load("src.f").delete("(row_id >= 440 and row_id < 445) or row_id = 6")
    shop.train(spec, until=28)
    shop.table("src.f", 480, 133)
    shop.table("src.f", 613, 87)
    shop.train(spec)


def followed_packed(shop: Workshop) -> None:
    """A table that is appended to, packed; documents are read in part where the run has caught up."""
    shop.table("src.fp", 0, 300)
    source = _source("src.fp", "tokens", follow="appends", identity_columns=["row_id"])
    spec = {"run": "followed_packed", "source": source, "order": _order(), "sequences": {"length": 16}}
    shop.train(spec, until=10)
    shop.table("src.fp", 300, 130)
    shop.train(spec)
    shop.table("src.fp", 430, 150)
    shop.train(spec)


def excluded(shop: Workshop) -> None:
    """Rows are excluded from passes that were entered, twice, and a pass is added."""
    shop.table("src.e", 0, 600)

    def train(*exclude: str, passes: int = 2, **more: Any) -> None:
        source = _source("src.e", exclude=list(exclude))
        shop.train({"run": "excluded", "source": source, "order": _order(passes=passes)}, **more)

    some = "row_id >= 100 and row_id < 330"
    train(until=15)
    train(some, until=18)
    train(some, "odd = true", until=30)
    train(some, "odd = true", passes=3)


def emptied(shop: Workshop) -> None:
    """Two tables in turns. The second is excluded as a whole in its first pass of two."""
    shop.table("src.m", 0, 300)
    shop.table("src.mt", 1000, 100)

    def train(*exclude: str, **more: Any) -> None:
        second = _source("src.mt", passes=2, exclude=list(exclude))
        shop.train({"run": "emptied", "source": _source("src.m"), "mixture": [second], "order": _order()}, **more)

    train(until=10)
    train("row_id >= 0")


def endless(shop: Workshop) -> None:
    """Again and again, until a step."""
    shop.table("src.n", 0, 200)
    shop.train({"run": "endless", "source": _source("src.n", passes=0), "order": _order(steps=31)})


def plain(shop: Workshop) -> None:
    """One table, three passes, the last batch not full."""
    shop.table("src.p", 0, 203)
    shop.train({"run": "plain", "source": _source("src.p"), "order": _order(passes=3)})


TABLES: dict[Callable[[Workshop], None], tuple[str, ...]] = {
    **{mixed: ("a", "b"), packed: ("da", "db"), transformed: ("tr",), followed: ("f",), followed_packed: ("fp",)},
    **{excluded: ("e",), emptied: ("m", "mt"), endless: ("n",), plain: ("p",)},
}
"""What trains a run of each kind, and the tables that it makes."""
KINDS = {train.__name__: train for train in TABLES}


def trained(shop: Workshop, kind: str) -> str:
    """The run of a kind, trained when it is first asked for: its name."""
    if kind not in shop.seen:
        KINDS[kind](shop)
    return kind


def rows_named(rows: list[Columns], *kinds: str) -> list[Columns]:
    """The rows of some kinds."""
    return [row for row in rows if row["kind"] in kinds]


def until_step(rows: list[Columns], step: int) -> list[Columns]:
    """The rows as they were right after the checkpoint at `step`."""
    seq = next(row["seq"] for row in rows if row["kind"] == "checkpoint" and row["step"] == step)
    return [row for row in rows if row["seq"] <= seq]


def changed(which: Callable[[Columns], bool], number: int = 0, **values: Any) -> Change:
    """A change of the `number`-th row that `which` picks."""

    def change(rows: list[Columns]) -> list[Columns]:
        chosen = [row for row in rows if which(row)][number]
        return [{**row, **values} if row is chosen else row for row in rows]

    return change


def without(which: Callable[[Columns], bool], number: int = 0) -> Change:
    """A change that drops the `number`-th row that `which` picks."""

    def change(rows: list[Columns]) -> list[Columns]:
        chosen = [row for row in rows if which(row)][number]
        return [row for row in rows if row is not chosen]

    return change


def doubled(rows: list[Columns]) -> list[Columns]:
    """The run with an advance that was recorded twice."""
    return [*rows, rows_named(rows, "advance")[3]]


def is_advance(row: Columns) -> bool:
    """Whether a row is an advance."""
    return bool(row["kind"] == "advance")


def unchanged(rows: list[Columns]) -> list[Columns]:
    """The change that changes nothing."""
    return rows


def check_script_agrees(lakehouse: Lakehouse, run: str, checkpoint: str | None = None) -> AuditReport:
    """Check that the script of a run, in a DuckDB that knows nothing of DLAC, ends with the audit's totals and verdict."""
    report, script = audit_run(lakehouse, run, checkpoint), explain_sql(lakehouse, run, checkpoint)
    with duckdb.connect() as plain:
        assert plain.execute(script).fetchall() == [(report.exact,)]
        [totals] = rows_of(plain, "FROM dlac_audit.audited_totals")
        problems = rows_of(plain, "FROM dlac_audit.found_problems ORDER BY problem")
    found = report.to_json()
    assert totals == {name: found[name] for name in totals}
    assert [row["problem"] for row in problems] == list(report.problems)
    return report
