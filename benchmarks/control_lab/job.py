"""The job that the nodes recover, and the real training that commits its checkpoint before, in a separate process."""

import importlib
import json
import subprocess
import sys
from contextlib import suppress
from math import lcm
from pathlib import Path
from typing import Any

import pyarrow as pa

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_SCRIPT = Path(__file__).parents[1] / "programs" / "control_rank.py"
_APART = (sys.executable, "-m", "benchmarks.control_lab.job")
_ROWS = 2**20
_KEY_GROUPS = 8


def make_source_apart(home: Path, catalog: str) -> None:
    """Make a lakehouse with the training table in a separate process, because this one may have no threads of libraries."""
    subprocess.run([*_APART, "source", str(home), catalog], check=True)


def _make_source(home: Path, catalog: str) -> None:
    lakehouse = connect(LakehouseConfig(uri=catalog).at_home(home))
    lakehouse.create_namespace("src")
    table = pa.table({"x": pa.array(range(_ROWS), pa.int32())})
    lakehouse.catalog.create_table("src.rows", table.schema).append(table)


def job(home: Path, catalog: str, *, run: str, counts: list[int], launch: dict[str, Any]) -> JobSpec:
    """Return a job whose batch each of these numbers of ranks divides."""
    raw = {
        "run": run,
        "source": {"table": "src.rows", "columns": ["x"]},
        "order": {"batch_size": lcm(_KEY_GROUPS, *counts), "key_groups": _KEY_GROUPS, "passes": 1_000_000},
        "checkpoint": {"every_steps": 1, "store": str(home / "store"), "local": str(home / "local" / "trainer")},
        "launch": {"script": str(_SCRIPT), **launch},
        "lakehouse": {"uri": catalog},
    }
    return parse_spec(raw, origin="the benchmark").resolved(home)


def commit_checkpoint(spec: JobSpec) -> list[str]:
    """Train in a separate process until a checkpoint is committed, and return a supervisor's modules."""
    done = subprocess.run([*_APART, "train", spec.model_dump_json()], check=True, stdout=subprocess.PIPE)
    modules: list[str] = json.loads(done.stdout.splitlines()[-1])
    return modules


def import_all(modules: list[str]) -> None:
    """Import the modules of supervisors, so that forked ones have them."""
    for name in modules:
        with suppress(ImportError):  # some modules can only be imported by their package
            importlib.import_module(name)


def _train(spec: JobSpec) -> None:
    def stop_after_checkpoint(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            supervisor.stop()

    supervisor = Supervisor(Request(spec=spec), on_event=stop_after_checkpoint)
    supervisor.run()


if __name__ == "__main__":
    if sys.argv[1] == "source":
        _make_source(Path(sys.argv[2]), sys.argv[3])
    else:
        _train(JobSpec.model_validate_json(sys.argv[2]))
        print(json.dumps(sorted(set(sys.modules) - {"__main__"})))
