"""Cost of a checkpoint of a model with ~100M parameters on the CPU: `python -m benchmarks.checkpoint [--quick]`.

One rank alternates, alone on the node: DLAC's checkpoint, and one without DLAC: `torch.save` or DeepSpeed's
`save_checkpoint`, each followed by an fsync of its files, and PyTorch's `torch.distributed.checkpoint.async_save`.
The stall is the wait of training: of the request for a batch, and of the next step of the optimizer. The training time lost is
the wait, and the time by which the steps beside a copy and its write were longer than others. Figures are medians without the
first checkpoint, which allocates memory on every side.

With `--storage` only bytes are measured: of the same state's checkpoints with 1,024 key groups that all advance, and of what
DLAC keeps beside the state: manifest with the reader's state, and ledger with all its metadata.

Beside these, or alone with `--adapter`, an adapter of a frozen layer of 1 GB is trained (with `--quick` of 67 MB). The bytes
of its checkpoints, which hard links of one file take once, are compared with the adapter's weights and moments.
"""

import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure, report
from dlac_pipeline.checkpoint.store import MANIFEST, folder_of
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_SCRIPT = Path(__file__).parent / "programs" / "checkpoint_rank.py"
Measured = list[dict[str, float]]
_EVERY = 8
"""Steps between two asynchronous checkpoints, in which one of torch.distributed is saved as well."""
_MEASURED = (
    ("torch", "asynchronous"),
    ("dcp", "asynchronous"),
    ("deepspeed", "asynchronous"),
    ("deepspeed", "synchronous"),
)


def main() -> None:
    """Measure the engines and modes, and report."""
    rounds = 4 if "--quick" in sys.argv[1:] else 12
    figures: dict[str, Figure] = {}
    if "--storage" in sys.argv[1:]:
        with tempfile.TemporaryDirectory(prefix="dlac-checkpoint-") as home:
            figures = measure_storage(Path(home), rounds)
    for engine in ("torch", "dcp") if not figures else ():
        with tempfile.TemporaryDirectory(prefix="dlac-checkpoint-") as home:
            figures |= measure_adapter(Path(home), engine, width=4_096 if rounds == 4 else 16_384)
    for engine, mode in () if {"--adapter", "--storage"} & {*sys.argv} else _MEASURED:
        with tempfile.TemporaryDirectory(prefix="dlac-checkpoint-") as home:
            measured = _measure(Path(home), engine, mode, rounds)
        print(json.dumps({"engine": engine, "mode": mode, "measured": measured}), flush=True)
        figures |= _figures(engine, mode, measured)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("checkpoint", figures)


def measure_storage(home: Path, rounds: int) -> dict[str, Figure]:
    """Return the bytes of checkpoints and of what is kept beside them, per checkpoint and over a run."""
    measured = _measure(home, "torch", "synchronous", rounds, rows=1_024, key_groups=1_024)
    ledger = Ledger(connect(LakehouseConfig().at_home(home)))
    rows = ledger.rows("checkpoint", kinds=(CheckpointRow,))
    manifest = folder_of(rows[-1].manifest_uri) / MANIFEST
    reader_state = json.dumps(json.loads(manifest.read_text())["reader_state"], separators=(",", ":"))
    table = Path(str(ledger.state("checkpoint").table.location()).removeprefix("file://"))
    ledger_bytes = sum(path.stat().st_size for path in table.rglob("*") if path.is_file())
    return storage_figures(
        plain_bytes=measured[-1]["plain_bytes"],
        state_bytes=measured[-1]["bytes"],
        manifest_bytes=manifest.stat().st_size,
        reader_state_bytes=len(reader_state),
        ledger_bytes=ledger_bytes,
        checkpoints=len(rows),
    )


def measure_adapter(home: Path, engine: str, *, width: int) -> dict[str, Figure]:
    """Return the bytes of the first and of later checkpoints of an adapter, over those of its state."""
    out = home / "sizes.json"
    table = pa.table({"row_id": pa.array(np.arange(6))})
    lakehouse = connect(LakehouseConfig().at_home(home))
    lakehouse.create_namespace("src")
    lakehouse.catalog.create_table("src.rows", table.schema).append(table)
    raw = {
        "run": "adapter",
        "source": {"table": "src.rows", "columns": ["row_id"]},
        "order": {"batch_size": 1, "key_groups": 1},
        "checkpoint": {"every_steps": 1, "memory": "", "engine": engine},
        "launch": {"script": str(_SCRIPT.with_name("adapter_rank.py"))},
        "params": {"width": str(width), "out": str(out)},
    }
    Supervisor(Request(spec=parse_spec(raw, origin="the benchmark").resolved(home))).run()
    sizes, seen, taken = json.loads(out.read_text()), set[int](), []
    for row in Ledger(lakehouse).rows("adapter", kinds=(CheckpointRow,)):
        found = {each.stat().st_ino: each.stat().st_size for each in folder_of(row.manifest_uri).iterdir()}
        taken.append(sum(size for number, size in found.items() if number not in seen))
        seen |= found.keys()
    print(json.dumps({"engine": engine, "sizes": sizes, "bytes_of_checkpoints": taken}), flush=True)
    later = statistics.median(taken[1:]) / sizes["adapter"]
    return {
        "adapter_base_bytes": Figure(value=sizes["base"], unit="bytes"),
        "adapter_state_bytes": Figure(value=sizes["adapter"], unit="bytes"),
        f"adapter_{engine}_first_over_state": Figure(value=taken[0] / sizes["adapter"], unit="ratio"),
        f"adapter_{engine}_later_over_state": Figure(value=later, unit="ratio", bar="<= 1.1"),
        "adapter_async_save_over_state": Figure(value=sizes["dcp"] / sizes["adapter"], unit="ratio"),
    }


def storage_figures(
    *,
    plain_bytes: float,
    state_bytes: float,
    manifest_bytes: float,
    reader_state_bytes: float,
    ledger_bytes: float,
    checkpoints: int,
) -> dict[str, Figure]:
    """Return the figures of one checkpoint, and of a run of so many. `plain_bytes`: a checkpoint without DLAC."""
    beside = state_bytes - plain_bytes + manifest_bytes + ledger_bytes / checkpoints
    return {
        "storage_without_dlac_bytes": Figure(value=plain_bytes, unit="bytes"),
        "storage_state_bytes": Figure(value=state_bytes, unit="bytes"),
        "storage_manifest_bytes": Figure(value=manifest_bytes, unit="bytes"),
        "storage_of_it_reader_state_bytes": Figure(value=reader_state_bytes, unit="bytes"),
        "storage_ledger_bytes_per_checkpoint": Figure(value=ledger_bytes / checkpoints, unit="bytes"),
        "storage_additional": Figure(
            value=100 * beside / plain_bytes, unit="% of a checkpoint without DLAC", bar="<= 0.2"
        ),
        "storage_checkpoints_of_the_run": Figure(value=checkpoints, unit="checkpoints"),
        "storage_run_additional_bytes": Figure(value=checkpoints * beside, unit="bytes"),
        "storage_run_checkpoint_bytes": Figure(value=checkpoints * plain_bytes, unit="bytes"),
        "storage_run_beside_last": Figure(
            value=100 * (ledger_bytes + manifest_bytes) / plain_bytes,
            unit="% of the checkpoint, if only the last is kept",
        ),
    }


def _measure(home: Path, engine: str, mode: str, rounds: int, *, rows: int = 8, key_groups: int = 1) -> Measured:
    lakehouse = connect(LakehouseConfig().at_home(home))
    lakehouse.create_namespace("src")
    every = _EVERY if mode == "asynchronous" else 1
    table = pa.table({"row_id": pa.array(np.arange(rows * every * (rounds + 2)))})
    lakehouse.catalog.create_table("src.rows", table.schema).append(table)
    (home / "scratch").mkdir()
    out = home / "measured.json"
    spec = parse_spec(
        {
            "run": "checkpoint",
            "source": {"table": "src.rows", "columns": ["row_id"]},
            "order": {"batch_size": rows, "key_groups": key_groups},
            # states in memory would be copies of their own within `step_done`
            "checkpoint": {"every_steps": every, "mode": mode, "keep_last": 1, "memory": ""},
            "launch": {"script": str(_SCRIPT), "env": {"OMP_NUM_THREADS": "2", "DS_ACCELERATOR": "cpu"}},
            "params": {"engine": engine, "scratch": str(home / "scratch"), "out": str(out)},
        },
        origin="the benchmark",
    ).resolved(home)
    events: list[dict[str, Any]] = []
    Supervisor(Request(spec=spec), on_event=events.append).run()
    events_by_step = {event["step"]: event for event in events if event["event"] == "checkpoint"}
    found: Measured = [json.loads(line) for line in out.read_text().splitlines()]
    return [
        {**one, "bytes": events_by_step[one["step"]]["bytes"], **events_by_step[one["step"]]["phases"]} for one in found
    ]


def _figures(engine: str, mode: str, measured: Measured) -> dict[str, Figure]:
    rounds = measured[1:]
    tag = f"{engine}_{mode}"
    found = {
        f"{tag}_plain_save_s": _seconds(one["plain_s"] for one in rounds),
        f"{tag}_total_s": _seconds(one["total"] for one in rounds),
        f"{tag}_write_s": _seconds(one["write"] for one in rounds),
        f"{tag}_digest_s": _seconds(one["digest"] for one in rounds),
        f"{tag}_commit_s": _seconds(one["commit"] for one in rounds),
        f"{tag}_bytes": Figure(value=rounds[-1]["bytes"], unit="bytes"),
        f"{tag}_extra_bytes": Figure(
            value=100 * (rounds[-1]["bytes"] / rounds[-1]["plain_bytes"] - 1), unit="%", bar="<= 0.1"
        ),
        "parameters": Figure(value=rounds[-1]["parameters"], unit="parameters"),
    }
    if mode == "synchronous":
        over = statistics.median(one["wait_s"] / one["plain_s"] for one in rounds)
        return found | {f"{tag}_over_plain": Figure(value=over, unit="ratio", bar="<= 1.1")}
    stall = statistics.median(one["wait_s"] / one["plain_s"] for one in rounds)
    found[f"{tag}_stall_s"] = _seconds(one["wait_s"] for one in rounds)
    found[f"{tag}_stall_share"] = Figure(value=100 * stall, unit="% of the plain save", bar="<= 15")
    if engine == "torch":
        found["torch_distributed_async_save_stall_s"] = _seconds(one["dcp_stall_s"] for one in rounds)
        found["torch_distributed_async_save_lost_s"] = _seconds(one["dcp_lost_s"] for one in rounds)
        found["step_s"] = _seconds(one["clean_s"] for one in rounds)
    if engine != "deepspeed":
        over = statistics.median(one["wait_s"] / one["dcp_stall_s"] for one in rounds)
        found[f"{tag}_stall_over_torch_distributed"] = Figure(value=over, unit="ratio", bar="<= 0.5")
        found[f"{tag}_lost_s"] = _seconds(one["lost_s"] for one in rounds)
        # Steps vary, and a difference may be negative.
        lost = [statistics.median(one[name] for one in rounds) for name in ("lost_s", "dcp_lost_s")]
        found[f"{tag}_lost_over_torch_distributed"] = Figure(value=lost[0] / lost[1], unit="ratio", bar="<= 1")
    return found


def _seconds(values: Iterator[float]) -> Figure:
    return Figure(value=statistics.median(values), unit="s")


if __name__ == "__main__":
    main()
