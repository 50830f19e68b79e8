"""Cost of listeners: `python -m benchmarks.listeners [--quick]`.

Pairs of runs on one table, with equal steps: one with MLflow (SQLite), Weights & Biases (offline) and Prometheus, one without
listeners, and a further one without (A/A). Their order changes from pair to pair. A figure is a ratio of seconds of a step, and
the median of the pairs. Listeners work twice a second and at checkpoints, so the median step shows only a lasting cost. The mean
of a run's second half shows all but their start. The processes of the listeners share the cores of this machine with the rank.
"""

import contextlib
import json
import os
import sqlite3
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
        os.environ |= {
            "WANDB_DIR": folder,
            "WANDB_MODE": "offline",
            "MLFLOW_TRACKING_URI": f"sqlite:///{home}/mlflow.db",
        }
        kinds = ("listened", "plain", "again")
        steps_of: list[dict[str, list[float]]] = []
        for pair in range(pairs):
            order = kinds if pair % 2 else kinds[::-1]
            steps_of.append({kind: _step_seconds(home, kind, pair) for kind in order})
            print(json.dumps({kind: statistics.median(each) for kind, each in steps_of[-1].items()}), flush=True)
        _check_listeners(home, pairs)
    step_s = statistics.median(statistics.median(each["plain"]) for each in steps_of)
    figures = {"step_ms": Figure(value=1e3 * step_s, unit="ms")}
    for prefix, summary in (("", statistics.median), ("mean_", _later_mean)):
        listened, again = (
            [summary(each[kind]) / summary(each["plain"]) for each in steps_of] for kind in ("listened", "again")
        )
        figures |= {
            f"{prefix}listened_over_plain": Figure(value=statistics.median(listened), unit="ratio"),
            f"{prefix}plain_over_plain": Figure(value=statistics.median(again), unit="ratio"),
            f"{prefix}plain_over_plain_spread": Figure(value=max(again) - min(again), unit="ratio"),
        }
    report("listeners", figures)


def _later_mean(seconds: list[float]) -> float:
    """Return the mean of the second half."""
    return statistics.mean(seconds[len(seconds) // 2 :])


def _check_listeners(home: Path, pairs: int) -> None:
    """Stop if a listener has not written a run per pair: one that fails costs nothing."""
    with contextlib.closing(sqlite3.connect(home / "mlflow.db")) as connection:
        (tracked,) = connection.execute("SELECT count(*) FROM runs").fetchone()
    found = {"mlflow": tracked, "wandb": len([*home.glob("wandb/offline-run-*")])}
    if found != dict.fromkeys(found, pairs):
        raise SystemExit(f"expected {pairs} runs of each listener, found {found}")


def _step_seconds(home: Path, kind: str, pair: int) -> list[float]:
    """Return the seconds of each step of a run."""
    out = home / f"{kind}-{pair}.json"
    listeners = {
        "mlflow": {"experiment": "benchmark"},
        "wandb": {"project": "benchmark"},
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
    seconds: list[float] = json.loads(out.read_text())
    return seconds


if __name__ == "__main__":
    main()
