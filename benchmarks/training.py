"""Cost of background checkpoints in a whole training: `python -m benchmarks.training [--quick]`.

One rank trains one model on the device of this node, in blocks of about 30 s. Every other block begins with an asynchronous
checkpoint, which is committed within it. A block with one is compared with the two without that surround it, and those with each
other. On the CPU writing and digesting share the cores with training. The first checkpoint, which allocates memory, is reported
separately.
"""

import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure, report
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_SCRIPT = Path(__file__).parent / "programs" / "training_rank.py"
FULL = {"width": "768", "layers": "10", "vocabulary": "18432", "tokens": "32"}
QUICK = {"width": "384", "layers": "4", "vocabulary": "4096", "tokens": "32"}
_BATCH = 8
_TRIED = 4
"""Steps of a block before their duration is known."""
Measured = dict[str, Any]


def main() -> None:
    """Train, and report."""
    quick = "--quick" in sys.argv[1:]
    params, block_s, pairs = (QUICK, 3.0, 4) if quick else (FULL, 30.0, 11)
    figures = measure_training(params, block_s=block_s, pairs=pairs, environment={"OMP_NUM_THREADS": "2"})
    if quick:  # the bar is one for a checkpoint every 30 s
        figures["with_over_without"] = replace(figures["with_over_without"], bar=None)
    report("training", figures | {"load_average_1min": Figure(value=os.getloadavg()[0], unit="processes")})


def measure_training(
    params: dict[str, str], *, block_s: float, pairs: int, environment: dict[str, str]
) -> dict[str, Figure]:
    """Train in blocks with and without a checkpoint, on the device of this node."""
    with tempfile.TemporaryDirectory(prefix="dlac-training-") as home:
        tried = _train(Path(home), params, _TRIED, 1, environment)["stamps_s"][_TRIED - 1 :: _TRIED]
    block = max(_TRIED, round(_TRIED * block_s / min(after - before for before, after in pairwise(tried))))
    with tempfile.TemporaryDirectory(prefix="dlac-training-") as home:
        found = _train(Path(home), params, block, pairs, environment)
    blocks = [after - before for before, after in pairwise(found["stamps_s"][block - 1 :: block])]
    taken, without = blocks[1::2], blocks[0::2]
    print(json.dumps({"with": taken, "without": without, "checkpoints": found["checkpoints"]}), flush=True)
    return {"parameters": Figure(value=found["parameters"], unit="parameters")} | _figures(
        taken, without, found["checkpoints"]
    )


def _figures(taken: list[float], without: list[float], checkpoints: list[dict[str, Any]]) -> dict[str, Figure]:
    """Return the figures of blocks with a checkpoint, of those without, and of the checkpoints."""
    around = [statistics.mean(pair) for pair in pairwise(without)]
    ratios = [one / beside for one, beside in zip(taken, around, strict=True)]
    same = [after / before for before, after in pairwise(without)]
    phases = [event["phases"] for event in checkpoints[1:]]
    stalls = statistics.median(each["stall"] for each in phases)
    return {
        "pairs": Figure(value=len(ratios) - 1, unit="blocks"),
        "bytes": Figure(value=checkpoints[-1]["bytes"], unit="bytes"),
        "block_without_s": Figure(value=statistics.median(without), unit="s"),
        "block_with_s": Figure(value=statistics.median(taken[1:]), unit="s"),
        "with_over_without": Figure(value=statistics.median(ratios[1:]), unit="ratio", bar="<= 1.02"),
        "with_over_without_first": Figure(value=ratios[0], unit="ratio"),
        "without_over_without_low": Figure(value=min(same), unit="ratio"),
        "without_over_without_high": Figure(value=max(same), unit="ratio"),
        "stall_s": Figure(value=stalls, unit="s"),
        "stall_alone": Figure(value=100 * stalls / statistics.median(without), unit="% of a block"),
        "committed_within_s": Figure(value=max(each["total"] for each in phases), unit="s"),
    }


def _train(home: Path, params: dict[str, str], block: int, pairs: int, environment: dict[str, str]) -> Measured:
    """Return the times of the steps' ends, and the checkpoints at the beginnings of blocks."""
    steps = block * (2 * pairs + 2)
    settings = {"every_steps": 2 * block, "keep_last": 1}
    blocks = {**params, "block": str(block), "steps": str(steps)}
    found = train(home, blocks, steps=steps, checkpoint=settings, environment=environment)
    return {**found, "checkpoints": [event for event in found["checkpoints"] if event["step"] < steps]}


def train(
    home: Path, params: dict[str, str], *, steps: int, checkpoint: dict[str, Any], environment: dict[str, str]
) -> Measured:
    """Train with asynchronous checkpoints. Return what the rank measured, and the committed checkpoints."""
    lakehouse = connect(LakehouseConfig().at_home(home))
    lakehouse.create_namespace("src")
    table = pa.table({"row_id": pa.array(np.arange(_BATCH * (steps + 1)))})
    lakehouse.catalog.create_table("src.rows", table.schema).append(table)
    out = home / "measured.json"
    spec = parse_spec(
        {
            "run": "training",
            "source": {"table": "src.rows", "columns": ["row_id"]},
            "order": {"batch_size": _BATCH, "key_groups": 1},
            "checkpoint": {"mode": "asynchronous", **checkpoint},
            "launch": {"script": str(_SCRIPT), "env": environment},
            "params": {"block": "1", "steps": str(steps), **params, "out": str(out)},
        },
        origin="the benchmark",
    ).resolved(home)
    events: list[dict[str, Any]] = []
    Supervisor(Request(spec=spec), on_event=events.append).run()
    found: Measured = json.loads(out.read_text())
    return {**found, "checkpoints": [event for event in events if event["event"] == "checkpoint"]}


if __name__ == "__main__":
    main()
