"""Cost of listeners: `python -m benchmarks.listeners [--quick]`.

Pairs of runs on one table, with equal steps: one with MLflow (SQLite), Weights & Biases (offline) and Prometheus, one without
listeners, and a further one without (A/A). Their order changes from pair to pair. A figure is the ratio of the median seconds of
a step, and the median of the pairs. The processes of the listeners share the cores of this machine with the rank.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks.figures import Figure, report
from benchmarks.overhead import make_sequences
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_SCRIPT = Path(__file__).parent / "programs" / "listened_rank.py"
_BATCH = 32


def main() -> None:
    """Measure, and report."""
    pairs, steps = (2, 100) if "--quick" in sys.argv[1:] else (7, 400)
    with tempfile.TemporaryDirectory(prefix="dlac-listeners-") as folder:
        home = Path(folder)
        lakehouse = connect(LakehouseConfig().at_home(home))
        lakehouse.create_namespace("src")
        table = make_sequences(_BATCH * steps)
        lakehouse.catalog.create_table("src.tokens", table.schema).append(table)
        os.environ["WANDB_DIR"] = folder
        kinds = ("listened", "plain", "again")
        pair_times: list[dict[str, float]] = []
        for pair in range(pairs):
            order = kinds if pair % 2 else kinds[::-1]
            pair_times.append({kind: _step_s(home, kind, pair) for kind in order})
            print(json.dumps(pair_times[-1]), flush=True)
    listened, again = ([each[kind] / each["plain"] for each in pair_times] for kind in ("listened", "again"))
    report(
        "listeners",
        {
            "step_ms": Figure(value=1e3 * statistics.median(each["plain"] for each in pair_times), unit="ms"),
            "listened_over_plain": Figure(value=statistics.median(listened), unit="ratio"),
            "plain_over_plain": Figure(value=statistics.median(again), unit="ratio"),
            "plain_over_plain_spread": Figure(value=max(again) - min(again), unit="ratio"),
        },
    )


def _step_s(home: Path, kind: str, pair: int) -> float:
    """Return the median seconds of a step of a run."""
    out = home / f"{kind}-{pair}.txt"
    listeners = {
        "mlflow": {"tracking_uri": f"sqlite:///{home}/mlflow.db", "experiment": "benchmark"},
        "wandb": {"project": "benchmark", "mode": "offline"},
        "prometheus": {"port": 9464},
    }
    spec = parse_spec(
        {
            "run": f"{kind}-{pair}",
            "source": {"table": "src.tokens", "columns": ["tokens"]},
            "order": {"batch_size": _BATCH},
            "checkpoint": {"every_steps": 50},
            "launch": {"script": str(_SCRIPT), "world_size": 1, "env": {"PYTHONPATH": str(_SCRIPT.parents[2])}},
            "listeners": listeners if kind == "listened" else {},
            "params": {"out": str(out)},
        },
        origin="the benchmark",
    ).resolved(home)
    Supervisor(Request(spec=spec)).run()
    return float(out.read_text())


if __name__ == "__main__":
    main()
