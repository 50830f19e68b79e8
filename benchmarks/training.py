"""What checkpoints cost a whole training: `python -m benchmarks.training [--quick]`.

One rank, the same steps of the same model on the CPU, in turn without checkpoints and with an asynchronous one every 30 s, and
as often without as with, so that the same side stands beside itself. Writing and digesting share the two cores with training.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure, report
from catalog.connect import LakehouseConfig, connect
from dlac_pipeline.recover.supervise import Supervisor
from dlac_pipeline.spec import parse_spec

_SCRIPT = Path(__file__).parent / "programs" / "training_rank.py"
_FULL = {"width": "768", "layers": "10", "vocabulary": "18432", "tokens": "32", "steps": "60"}
_QUICK = {"width": "384", "layers": "4", "vocabulary": "4096", "tokens": "32", "steps": "40"}
_BATCH = 8
Measured = dict[str, Any]


def main() -> None:
    """Train in turn, and report."""
    quick = "--quick" in sys.argv[1:]
    params, every_s, rounds = (_QUICK, 3.0, 1) if quick else (_FULL, 30.0, 2)
    without: list[Measured] = []
    taken: list[Measured] = []
    for _ in range(rounds):
        without.append(_train(params, None))
        taken.append(_train(params, every_s))
    without.append(_train(params, None))
    ratios = [
        one["trained_s"] / statistics.mean([before["trained_s"], after["trained_s"]])
        for one, before, after in zip(taken, without, without[1:], strict=False)
    ]
    same = [after["trained_s"] / before["trained_s"] for before, after in pairwise(without)]
    stalls = sum(event["phases"]["stall"] for one in taken for event in one["checkpoints"])
    figures = {
        "parameters": Figure(value=without[0]["parameters"], unit="parameters"),
        "every_s": Figure(value=every_s, unit="s"),
        "checkpoints": Figure(value=sum(len(one["checkpoints"]) for one in taken) / len(taken), unit="per training"),
        "bytes": Figure(value=taken[0]["checkpoints"][0]["bytes"], unit="bytes"),
        "trained_without_s": Figure(value=statistics.median(one["trained_s"] for one in without), unit="s"),
        "trained_with_s": Figure(value=statistics.median(one["trained_s"] for one in taken), unit="s"),
        "with_over_without": Figure(value=statistics.median(ratios), unit="ratio", bar="<= 1.02"),
        "without_over_without_low": Figure(value=min(same), unit="ratio"),
        "without_over_without_high": Figure(value=max(same), unit="ratio"),
        "stalls_alone": Figure(
            value=100 * stalls / sum(one["trained_s"] for one in taken), unit="% of the time with checkpoints"
        ),
        "load_average_1min": Figure(value=os.getloadavg()[0], unit="processes"),
    }
    report("training", figures)


def _train(params: dict[str, str], every_s: float | None) -> Measured:
    """One training; the checkpoint at its end, which both sides take, is not in it."""
    steps = int(params["steps"])
    with tempfile.TemporaryDirectory(prefix="dlac-training-") as folder:
        home = Path(folder)
        lakehouse = connect(LakehouseConfig().at_home(home))
        lakehouse.create_namespace("src")
        table = pa.table({"row_id": pa.array(np.arange(_BATCH * (steps + 1)))})
        lakehouse.catalog.create_table("src.rows", table.schema).append(table)
        when: dict[str, Any] = {"every_steps": 10 * steps} if every_s is None else {"every_s": every_s}
        spec = parse_spec(
            {
                "run": "training",
                "source": {"table": "src.rows", "columns": ["row_id"]},
                "order": {"batch_size": _BATCH, "key_groups": 1},
                "checkpoint": {**when, "mode": "asynchronous", "keep_last": 1},
                "launch": {"script": str(_SCRIPT), "env": {"OMP_NUM_THREADS": "2"}},
                "params": {**params, "out": str(home / "measured.json")},
            },
            origin="the benchmark",
        ).resolved(home)
        events: list[dict[str, Any]] = []
        Supervisor(spec, on_event=events.append).run()
        found: Measured = json.loads((home / "measured.json").read_text())
        taken = [event for event in events if event["event"] == "checkpoint" and event["step"] < steps]
        print(json.dumps({"every_s": every_s, "trained_s": found["trained_s"], "checkpoints": len(taken)}), flush=True)
        return {**found, "checkpoints": taken}


if __name__ == "__main__":
    main()
