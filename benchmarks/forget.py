"""Requests to forget a document: `python -m benchmarks.forget [--quick] [--requests N] [--late N]`.

Two runs, `a` and `b`, train a small model on the same 3,840 rows in different orders for 108 of 120 steps, with a checkpoint
every 5 steps. `c` is a fork of `a` at step 35, and trains 30 steps. A document is one row. For each request the lakehouse is as
it was before. `dlac forget rows` plans and executes, the runs are trained again, and a fork whose first checkpoint has seen the
document is forked again. The oracle trains the same runs from step 0 without the document, on the cut that the run has. To have
a checkpoint of step 0, all runs are forks of a run of one step over another table.

`identical` counts the requests after which the losses of all steps and the final model have the oracle's bits, and whose
certificate and its script in a plain DuckDB hold. `replayed` is the number of repeated steps as a share of the steps of all runs,
which a retraining repeats. In the second part `a` and `b` mix 3,456 rows with 384 rows that are placed late, and the requests
are for those.
"""

import argparse
import json
import multiprocessing
import os
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import numpy as np
import pyarrow as pa
import torch
import yaml

import dlac_pipeline as dlac
from benchmarks.figures import Figure, report
from dlac_pipeline.extensions.branches.retire import retire_left
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.erasure.certificate import certify, make_key
from dlac_pipeline.extensions.erasure.execution import execute_forget
from dlac_pipeline.extensions.erasure.forget import ForgetPlan, plan_forget
from dlac_pipeline.extensions.exchange.fork import fork_run
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, lineage_of
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow
from dlac_pipeline.plan.source_order import Cursor, SourceOrder, SourceStart
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec

_BATCH, _STEPS, _EVERY, _FORK_AT, _FORK_STEPS = 32, 108, 5, 35, 30
_ROWS, _LATE_ROWS = 3_840, 384
_WORKERS = 2


def main() -> None:
    """Forget documents, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--late", type=int, default=20)
    chosen = parser.parse_args()
    figures: dict[str, Figure] = {}
    for late, count in ((False, 4 if chosen.quick else chosen.requests), (True, 2 if chosen.quick else chosen.late)):
        with tempfile.TemporaryDirectory(prefix="dlac-forget-") as folder:
            figures |= _part(Path(folder), count, late=late)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("forget", figures)


def _part(folder: Path, count: int, *, late: bool) -> dict[str, Figure]:
    """Meet the requests of one part in some processes, and return its figures."""
    documents = random.Random(7).sample(range(_LATE_ROWS if late else _ROWS), count)
    with ProcessPoolExecutor(_WORKERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        tasks = [
            pool.submit(_meet_all, folder / str(part), documents[part::_WORKERS], late) for part in range(_WORKERS)
        ]
        found = [each for task in tasks for each in task.result()]
    shares = [each["replayed"] for each in found]
    name, bar = ("late_", "<= 0.15") if late else ("", "<= 0.5")
    return {
        f"{name}identical": Figure(
            value=sum(each["identical"] for each in found), unit=f"of {count}", bar=f">= {count}"
        ),
        f"{name}replayed_mean": Figure(value=statistics.mean(shares), unit="of retraining", bar=bar),
        f"{name}replayed_p50": Figure(value=statistics.median(shares), unit="of retraining"),
        f"{name}forks_again": Figure(value=sum(each["forks_again"] for each in found), unit=f"of {count}"),
        f"{name}plan_p50_s": Figure(value=statistics.median(each["plan_s"] for each in found), unit="s"),
        f"{name}execute_p50_s": Figure(value=statistics.median(each["execute_s"] for each in found), unit="s"),
    }


def _meet_all(folder: Path, documents: list[int], late: bool) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    home, before = folder / "home", folder / "before"
    _prepare(home, late)
    home.rename(before)
    found = []
    for document in documents:
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(before, home)
        found.append(_meet(home, document, late))
        print(json.dumps({"document": document, "late": late, **found[-1]}), flush=True)
    return found


def _prepare(home: Path, late: bool) -> None:
    """Write the tables, and train the runs."""
    lakehouse = connect(LakehouseConfig().at_home(home), create=True)
    lakehouse.create_namespace("src")
    _write(lakehouse, "src.first", _BATCH, 0)
    _write(lakehouse, "src.docs", _ROWS - _LATE_ROWS if late else _ROWS, 1)
    _write(lakehouse, "src.late", _LATE_ROWS, 2)
    _train(home, _spec(home, "first", "src.first", steps=1))
    for run, seed in (("a", 1), ("b", 2)):
        spec = _spec(home, run, "src.docs", late=late, seed=seed)
        fork_run(lakehouse, spec, "first")
        _train(home, spec)
    if not late:
        fork_run(lakehouse, _fork(home, "c"), "a", step=_FORK_AT)
        _train(home, _fork(home, "c"))


def _meet(home: Path, document: int, late: bool) -> dict[str, Any]:
    """Forget a document, and compare the runs with those of the oracle."""
    lakehouse = connect(LakehouseConfig().at_home(home))
    table, filters = "src.late" if late else "src.docs", [f"doc_id = {document}"]
    runs = {run: _spec(home, run, "src.docs", late=late, seed=seed) for run, seed in (("a", 1), ("b", 2))}
    specs = runs if late else {**runs, "c": _fork(home, "c"), "again": _fork(home, "again")}
    started = time.perf_counter()
    plan = plan_forget(lakehouse, table, filters)
    planned = time.perf_counter()
    execute_forget(lakehouse, table, filters, specs.get)
    executed = time.perf_counter()
    forks_again = any(run["action"] == "fork again" for run in plan["runs"])
    for run, spec in runs.items():
        if run in {each["run"] for each in plan["runs"] if each["action"] == "rewind"}:
            _train(home, spec)
    if forks_again:
        fork_run(lakehouse, specs["again"], "a", step=_FORK_AT)
        execute_forget(lakehouse, table, filters, specs.get)
        _train(home, specs["again"])
        retire_left(Ledger(lakehouse), "c", whole=True)
        shutil.rmtree(home / "checkpoints" / "c")
    elif not late and any(run["run"] == "c" and run["action"] == "rewind" for run in plan["runs"]):
        _train(home, specs["c"])
    same = _is_certified(lakehouse, table, filters, specs, home)
    cuts = {run: _has_opened(lakehouse, plan, run, source=int(late)) for run in specs}
    for run, spec in runs.items():
        oracle = _oracle(lakehouse, home, spec, ("first", None), (table, filters), opened=cuts[run])
        same &= _outcome(lakehouse, run) == _outcome(lakehouse, oracle)
        if run == "a" and not late:
            fork = "again" if forks_again else "c"
            _oracle(lakehouse, home, specs["c"], (oracle, _FORK_AT), (table, filters), opened=cuts[fork])
            same &= _outcome(lakehouse, fork) == _outcome(lakehouse, "oracle-c")
    steps = sum(len(_outcome(lakehouse, f"oracle-{run}")[1]) for run in ("a", "b", *(() if late else ("c",))))
    return {
        "identical": same,
        "replayed": sum(run["steps_to_replay"] for run in plan["runs"]) / steps,
        "forks_again": forks_again,
        "plan_s": planned - started,
        "execute_s": executed - planned,
    }


def _has_opened(lakehouse: Lakehouse, plan: ForgetPlan, run: str, source: int) -> bool:
    """Return True if a run was in the pass of a source when the rows were excluded, so that the pass is not cut again."""
    clean = next((each["clean_step"] for each in plan["runs"] if each["run"] == run), None)
    clean = _STEPS if clean is None and run != "again" else clean or 0
    advances = Ledger(lakehouse).rows(run, kinds=(AdvanceRow,))
    return any(row.source == source and row.step <= clean for row in advances)


def _oracle(
    lakehouse: Lakehouse,
    home: Path,
    spec: JobSpec,
    parent: tuple[str, int | None],
    request: tuple[str, list[str]],
    *,
    opened: bool,
) -> str:
    """Train a run from its beginning without the rows, and with its pass `opened` on the same cut. Return its name."""
    run, (table, filters) = f"oracle-{spec.run}", request
    spec = spec.model_copy(update={"run": run})
    fork_run(lakehouse, spec, parent[0], step=parent[1])
    head = Ledger(lakehouse).state(run).fence.head
    exclude = [(table, where) if len(spec.sources) > 1 else where for where in filters]
    rewind_run(lakehouse, run, nonce="oracle", target=head or 0, exclude=exclude, spec=spec)
    with patch.object(SourceOrder, "finish_at", _finish_in_pass) if opened else nullcontext():
        _train(home, spec)
    return run


_FINISH_AT = SourceOrder.finish_at


def _finish_in_pass(order: SourceOrder, cursors: Sequence[Cursor]) -> SourceStart:
    """Return the state of a source that is in its first pass, at whose beginning it may be."""
    entered = [Cursor(position=1), *cursors[1:]] if not any(map(any, cursors)) else cursors
    return replace(_FINISH_AT(order, entered), cursors=tuple(cursors))


def _outcome(lakehouse: Lakehouse, run: str) -> tuple[str, list[str]]:
    """Return the digest of a run's final model, and the bits of all its losses."""
    rows = Ledger(lakehouse).head_rows(run)
    known, head = checkpoint_rows(rows), Ledger(lakehouse).state(run).fence.head
    lineage = [known[name] for name in reversed(lineage_of(rows, head))]
    return lineage[-1].model_digest, [loss.hex() for row in lineage for loss in row.losses]


def _is_certified(lakehouse: Lakehouse, table: str, filters: list[str], specs: dict[str, JobSpec], home: Path) -> bool:
    key = home / "key.pem"
    make_key(key)
    document = certify(lakehouse, table, filters, specs.get, file=home / "certificate.json", key=key)
    with duckdb.connect() as plain:
        return not plain.execute(document["certificate"]["script"]).fetchall()


def _train(home: Path, spec: JobSpec) -> None:
    """Train a run to its end in this process."""
    path = home / f"{spec.run}.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump()))
    os.environ["DLAC_HOME"] = str(home)
    with dlac.training_run(path) as run:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        for batch in run.batches():
            errors = model(batch["x"])[:, 0] - batch["y"] + 0.01 * torch.rand(_BATCH)
            loss = batch.mean(errors.square())
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            run.step_done(loss)


def _write(lakehouse: Lakehouse, name: str, rows: int, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=(rows, 17)).astype(np.float32)
    columns = {
        "doc_id": np.arange(rows),
        "x": pa.array(list(values[:, :16]), pa.list_(pa.float32())),
        "y": values[:, 16],
    }
    table = pa.table(columns)
    lakehouse.catalog.create_table(name, table.schema, properties={"write.parquet.row-group-limit": "100"})
    lakehouse.load(name).append(table)


def _fork(home: Path, run: str) -> JobSpec:
    return _spec(home, run, "src.docs", seed=3, steps=_FORK_STEPS)


def _spec(home: Path, run: str, table: str, *, late: bool = False, seed: int = 1, steps: int = _STEPS) -> JobSpec:
    source = {"table": table, "columns": ["x", "y"]}
    more = [{"table": "src.late", "columns": ["x", "y"], "place": "late"}] if late else []
    raw: dict[str, Any] = {
        "run": run,
        "source": source,
        "mixture": more,
        "order": {"batch_size": _BATCH, "key_groups": 8, "seed": seed, "passes": 1, "steps": None if late else steps},
        "checkpoint": {"every_steps": _EVERY, "keep_last": 0},
        "launch": {"script": str(Path(__file__)), "world_size": 1},
    }
    return parse_spec(raw, origin="the benchmark").resolved(home)


if __name__ == "__main__":
    main()
