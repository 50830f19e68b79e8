"""Cost of tracking and the ledger: `python -m benchmarks.overhead [--quick] [--step-ms N ...]`.

Two ranks train a small transformer on a real table. Within one process, segments of steps with `run.step_done` alternate
with segments of the same loop on the same tensors without it. The untracked segments against each other give
the noise (A/A). The microseconds of tracking are measured directly, around `step_done`, in steps without a checkpoint.
They are the mean over a segment, and the median of the segments.
With `--step-ms`, steps of 16 rows and 16 key groups follow, in which each rank computes until so many milliseconds have passed.
States in memory are off: `benchmarks.memory_recovery` has their cost. Checkpoints are saved between segments. Their ledger bytes
are those of the ledger's data files.
"""

import argparse
import json
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure, report
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_SEQUENCE = 32
_SCRIPT = Path(__file__).parent / "programs" / "overhead_rank.py"


def main() -> None:
    """Measure at G = 64 and G = 1,024, then steps of each length, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--step-ms", type=int, nargs="*", default=[], help="lengths of steps to measure in addition")
    chosen = parser.parse_args()
    steps = 3 if chosen.quick else 8
    measured = [Load(tag=f"g{groups}", key_groups=groups, steps=steps) for groups in (64, 1024)]
    measured += [
        Load(tag=f"{ms}ms", key_groups=16, steps=max(steps, 200 // ms), batch_size=16, step_ms=ms, most_share=1.0)
        for ms in chosen.step_ms
    ]
    figures: dict[str, Figure] = {}
    for load in measured:
        with tempfile.TemporaryDirectory(prefix="dlac-overhead-") as home:
            figures |= measure(Path(home), load)
    report("overhead", figures)


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """A training whose tracking is measured. `tag` names its figures."""

    tag: str
    key_groups: int
    steps: int
    """Steps of a segment."""
    batch_size: int = 1024
    step_ms: int = 0
    """Time for which each rank computes in a step, at least."""
    most_share: float = 0.1
    """Bar of the share of tracking (%)."""
    pairs: int = 10


def measure(home: Path, load: Load) -> dict[str, Figure]:
    """Train with and without tracking, in turn."""
    # Each pair has one tracked and two untracked segments. The tracked one ends after its own checkpoint.
    batch_size, pairs, steps = load.batch_size, load.pairs, load.steps
    rows = batch_size * steps * (pairs + 1)
    config = LakehouseConfig().at_home(home)
    lakehouse = connect(config)
    lakehouse.create_namespace("src")
    table = make_sequences(rows)
    properties = {"write.parquet.row-group-limit": "512"}
    lakehouse.catalog.create_table("src.tokens", table.schema, properties=properties).append(table)
    spec = parse_spec(
        {
            "run": "overhead",
            "source": {"table": "src.tokens", "columns": ["tokens"]},
            "order": {"batch_size": batch_size, "key_groups": load.key_groups, "block_slices": 4},
            "checkpoint": {"every_steps": steps, "memory": ""},
            "launch": {"script": str(_SCRIPT), "world_size": 2},
            "params": {
                "steps": str(steps),
                "pairs": str(pairs),
                "step_ms": str(load.step_ms),
                "out": str(home / "figures.json"),
            },
        },
        origin="the benchmark",
    ).resolved(home)
    Supervisor(Request(spec=spec)).run()
    measured: dict[str, Any] = json.loads((home / "figures.json").read_text())
    print(json.dumps({**asdict(load), **measured}), flush=True)
    figures = _figures(load, measured)
    return figures if load.step_ms else figures | _sizes(load, Ledger(lakehouse))


def _figures(load: Load, measured: dict[str, Any]) -> dict[str, Figure]:
    tag = load.tag
    plain, again, tracked = (np.array(measured[name]) for name in ("plain_s", "again_s", "tracked_s"))
    step_s = float(np.median(plain))
    tracking_us = statistics.median(measured["tracking_us"])
    figures = {
        f"tracking_us_per_step_{tag}": Figure(value=tracking_us, unit="us"),
        f"tracking_share_of_step_{tag}": Figure(
            value=100 * tracking_us / 1e6 / step_s, unit="%", bar=f"<= {load.most_share}"
        ),
        f"step_ms_{tag}": Figure(value=1e3 * step_s, unit="ms"),
        f"checkpoint_ms_{tag}": Figure(value=1e3 * statistics.median(measured["checkpoint_s"]), unit="ms"),
    }
    if load.step_ms:  # a step of a given length hides what is done beside it
        return figures
    return figures | {
        f"tracked_over_plain_{tag}": Figure(value=float(np.median(tracked / plain)), unit="ratio"),
        f"plain_over_plain_{tag}": Figure(value=float(np.median(again / plain)), unit="ratio"),
        f"plain_over_plain_spread_{tag}": Figure(
            value=float(np.ptp(np.quantile(again / plain, [0.25, 0.75]))), unit="ratio"
        ),
    }


def _sizes(load: Load, ledger: Ledger) -> dict[str, Figure]:
    tag = load.tag
    rows = ledger.rows("overhead", kinds=(CheckpointRow,))
    manifest = json.loads((folder_of(rows[-1].manifest_uri) / "manifest.json").read_text())
    state = len(json.dumps(manifest["reader_state"], separators=(",", ":")))
    table = ledger.state("overhead").table
    files = list(table.scan().plan_files())
    data = sum(task.file.file_size_in_bytes for task in files)
    return {
        f"reader_state_bytes_{tag}": Figure(
            value=state, unit="bytes", bar="<= 65536" if load.key_groups == 1024 else None
        ),
        f"ledger_data_bytes_per_checkpoint_{tag}": Figure(value=data / len(rows), unit="bytes"),
        f"advance_rows_per_checkpoint_{tag}": Figure(
            value=len(ledger.rows("overhead", kinds=(AdvanceRow,))) / len(rows), unit="rows"
        ),
    }


def make_sequences(rows: int) -> pa.Table:
    """Return rows of 32 random tokens."""
    tokens = np.random.default_rng(0).integers(0, 512, size=rows * _SEQUENCE, dtype=np.int32)
    offsets = np.arange(0, (rows + 1) * _SEQUENCE, _SEQUENCE, dtype=np.int32)
    lists = pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))
    return pa.table({"row_id": pa.array(np.arange(rows)), "tokens": lists})


if __name__ == "__main__":
    main()
