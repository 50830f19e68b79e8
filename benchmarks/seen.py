"""Who has seen a document: `python -m benchmarks.seen [--quick]`.

A table of 10 million rows, whose identity is a column of texts, is planned without keys of its rows, and then with them. One
rank trains on 819,200 of the rows and records what its batches had. Then 100 random documents that a checkpoint has consumed,
100 others of the table, and 100 that are in no table are asked for, after the data files were deleted: in SQL on an open
connection, and some of each by the command, a fresh process each. An answer is right if its checkpoint is the one after the
recorded step. `key_bytes` is of the data files of `row_keys`.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
import torch
import yaml

import dlac_pipeline as dlac
from benchmarks.figures import Figure, report
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.plan.planner import make_plan
from dlac_pipeline.spec.job_spec import SourceSpec

_FILES = 10
_EACH = 100
_ROWS = "SELECT range AS row_id, 'https://example.org/' || md5(range::VARCHAR) AS url FROM range($1, $2)"
Seen = dict[int, int]
"""Row id -> step of the checkpoint that consumed it."""


def main() -> None:
    """Write the table, key it, train, ask, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rows", type=int, default=10_000_000)
    chosen = parser.parse_args()
    rows, batch = (200_000, 256) if chosen.quick else (chosen.rows, 8192)
    with tempfile.TemporaryDirectory(prefix="dlac-seen-") as folder:
        home = Path(folder) / "home"
        lakehouse = connect(LakehouseConfig().at_home(home))
        _write_table(lakehouse, rows)
        figures = _key(lakehouse, rows)
        seen = _train(lakehouse, home, batch)
        for path in home.glob("warehouse/src/docs/data/*.parquet"):
            path.unlink()
        figures |= _ask(lakehouse, home, rows, seen)
    figures["rows"] = Figure(value=rows, unit="rows")
    figures["rows_consumed"] = Figure(value=len(seen), unit="rows")
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("seen", figures)


def _write_table(lakehouse: Lakehouse, rows: int) -> None:
    lakehouse.create_namespace("src")
    size = rows // _FILES
    with duckdb.connect() as connection:
        for start in range(0, rows, size):
            part: Any = connection.execute(_ROWS, [start, start + size]).to_arrow_table()
            if not start:
                properties = {"write.parquet.row-group-limit": "65536"}
                lakehouse.catalog.create_table("src.docs", part.schema, properties=properties)
            lakehouse.load("src.docs").append(part)


def _key(lakehouse: Lakehouse, rows: int) -> dict[str, Figure]:
    """Plan without keys, then with them. Return the costs of the keys."""
    source = SourceSpec(table="src.docs", columns=["row_id"], identity_columns=["url"])
    make_plan(lakehouse, source)
    started, cpu = time.perf_counter(), time.process_time()
    make_plan(lakehouse, source.model_copy(update={"row_keys": True}))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    files = [task.file for task in lakehouse.own("row_keys").scan().plan_files()]
    assert sum(file.record_count for file in files) == rows + _FILES
    return {
        "key_bytes": Figure(
            value=sum(file.file_size_in_bytes for file in files) / rows, unit="bytes per row", bar="<= 16"
        ),
        "key_files": Figure(value=len(files), unit="files"),
        "keyed_rows_per_s": Figure(value=rows / seconds, unit="rows/s", bar=">= 100000"),
        "keyed_rows_per_cpu_s": Figure(value=rows / cpu, unit="rows/s"),
        "planner_peak_mb": Figure(value=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, unit="MiB"),
    }


def _train(lakehouse: Lakehouse, home: Path, batch_size: int) -> Seen:
    """Train 109 steps, of which the checkpoint of step 100 is the last one. Return the rows of the committed steps."""
    source = {"table": "src.docs", "columns": ["row_id"], "identity_columns": ["url"], "row_keys": True}
    spec = {
        "run": "reader",
        "source": source,
        "order": {"batch_size": batch_size, "key_groups": 8, "seed": 5},
        "checkpoint": {"every_steps": 20},
        "launch": {"script": "x.py"},
    }
    (home / "job.yaml").write_text(yaml.safe_dump(spec))
    os.environ["DLAC_HOME"] = str(home)
    recorded: dict[int, list[int]] = {}
    with dlac.training_run(home / "job.yaml") as run:
        run.restore(dlac.TorchState(model=torch.nn.Linear(2, 1)))
        for batch in run.batches():
            if batch.step == 110:
                break
            recorded[batch.step] = batch["row_id"][batch.valid].tolist()
            run.step_done(0.5)
    steps = [row.step for row in Ledger(lakehouse).rows("reader", kinds=(CheckpointRow,))]
    return {
        row: min(at for at in steps if at >= step) for step in recorded if step <= max(steps) for row in recorded[step]
    }


def _ask(lakehouse: Lakehouse, home: Path, rows: int, seen: Seen) -> dict[str, Figure]:
    """Ask for documents that were consumed, others of the table, and others. Return times and wrong answers."""
    draw = random.Random(7)
    unseen = [row for row in draw.sample(range(rows), 4 * _EACH) if row not in seen][:_EACH]
    kinds = {
        "consumed": draw.sample(sorted(seen), _EACH),
        "unread": unseen,
        "absent": [rows + place for place in range(_EACH)],
    }
    steps = {row.checkpoint_id: row.step for row in Ledger(lakehouse).rows("reader", kinds=(CheckpointRow,))}
    figures, wrong, cold = {}, 0, []
    started = time.perf_counter()
    with open_audit(lakehouse, query="seen_by keys_of") as connection, duckdb.connect() as names:
        figures["open_s"] = Figure(value=time.perf_counter() - started, unit="s")
        for kind, asked in kinds.items():
            warm = []
            for place, row in enumerate(asked):
                [(_, url)] = names.execute(_ROWS, [row, row + 1]).fetchall()
                started = time.perf_counter()
                [(key,)] = connection.execute("SELECT key FROM keys_of([$1])", [url]).fetchall()
                found = connection.execute(f"SELECT checkpoint_id FROM seen_by({key})").fetchall()
                warm.append(time.perf_counter() - started)
                wanted = [seen[row]] if row in seen else []
                wrong += [steps[checkpoint] for (checkpoint,) in found] != wanted
                if place < 3:
                    started = time.perf_counter()
                    answer = _command(home, url)
                    cold.append(time.perf_counter() - started)
                    wrong += [steps[each["checkpoint_id"]] for each in answer["seen_by"]] != wanted
                    wrong += len(answer["places"]) != (kind != "absent")
            figures[f"{kind}_warm_p50_s"] = Figure(value=statistics.median(warm), unit="s", bar="<= 1")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    figures["cold_p50_s"] = Figure(value=statistics.median(cold), unit="s", bar="<= 3")
    figures["cold_mean_cpu_s"] = Figure(value=(used.ru_utime + used.ru_stime) / len(cold), unit="s")
    return {"wrong_answers": Figure(value=wrong, unit="answers", bar="<= 0"), **figures}


def _command(home: Path, url: str) -> dict[str, Any]:
    """Return the answer of `dlac seen`."""
    command = [str(Path(sys.executable).with_name("dlac")), "seen", url, "--json", "--home", str(home)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


if __name__ == "__main__":
    main()
