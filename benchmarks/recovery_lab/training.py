"""The training that both recovery benchmarks kill: its table, its DLAC job, and its steps as observed from outside."""

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.programs.recovery_sizes import BATCH, EVERY_STEPS, WIDTH
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect

PROGRAMS = Path(__file__).parents[1] / "programs"
RANKS = 2


def make_source(home: Path) -> Lakehouse:
    """Make a lakehouse with the training table."""
    lakehouse = connect(LakehouseConfig().at_home(home))
    fill_source(lakehouse)
    return lakehouse


def fill_source(lakehouse: Lakehouse) -> None:
    """Make the training table."""
    lakehouse.create_namespace("src")
    table = pa.table({"x": pa.FixedSizeListArray.from_arrays(make_numbers(), WIDTH)})
    table = table.cast(pa.schema([pa.field("x", pa.list_(pa.float32()))]))
    lakehouse.catalog.create_table("src.rows", table.schema).append(table)


def make_numbers() -> np.typing.NDArray[np.float32]:
    """Return the values of all rows of the training table."""
    return np.random.default_rng(0).standard_normal(20_000 * WIDTH).astype(np.float32)


def source_files(lakehouse: Lakehouse) -> list[str]:
    """Return the table's Parquet files for the bare script."""
    files = lakehouse.load("src.rows").inspect.files()["file_path"].to_pylist()
    return [path.removeprefix("file://") for path in files]


def job(stamps: Path, *, start: str) -> dict[str, Any]:
    """Return the job spec of the side with DLAC. `start` is its `launch.start`."""
    return {
        "run": "recovery",
        "source": {"table": "src.rows", "columns": ["x"], "passes": 1_000},
        "order": {"batch_size": BATCH, "key_groups": 8},
        "checkpoint": {"every_steps": EVERY_STEPS, "keep_last": 2, "memory": ""},
        "launch": {
            "script": str(PROGRAMS / "recovery_rank.py"),
            "world_size": RANKS,
            "start": start,
            "preload": ["deepspeed"],
            "env": {"DS_ACCELERATOR": "cpu"},
        },
        "params": {"stamps": str(stamps)},
    }


def steps_after(
    stamps: Path, moment: float, steps: int, *, not_by: Collection[int] = (), within_s: float = 300
) -> float:
    """Wait until other processes have done `steps` steps after a moment, and return the time of the last one.

    Raises:
        TimeoutError: they have not done them in time.
    """
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        lines = stamps.read_text().splitlines() if stamps.exists() else []
        done = [float(at) for pid, _, at in map(str.split, lines) if int(pid) not in not_by and float(at) > moment]
        if len(done) >= steps:
            return done[steps - 1]
        time.sleep(0.01)
    raise TimeoutError(f"expected {steps} steps after {moment} within {within_s:.0f} s, found none in {stamps}")
