"""Batches of the reader for a model: the saving by a copy stream, and the wait of the model."""

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.figures import Figure
from benchmarks.gpu_parts.node import PROGRAMS, run_program
from benchmarks.gpu_parts.sizes import ModelSize, Sizes
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import connect

_ROWS_BYTES = 64 * 2**20
"""Maximum tokens of the table. The reader decodes them again in each of several passes."""


def measure_loading(home: Path, sizes: Sizes) -> dict[str, Figure]:
    """Measure all sides, and return their figures."""
    _make_table(home, sizes.model)
    asked = {"home": str(home), "model": asdict(sizes.model), "segment_s": sizes.segment_s, "pairs": sizes.pairs}
    found = run_program([sys.executable, str(PROGRAMS / "gpu_loading.py"), json.dumps(asked)])
    print(json.dumps(found), flush=True)
    return loading_figures(found)


def loading_figures(found: dict[str, Any]) -> dict[str, Figure]:
    """Return the figures of the results of `gpu_loading.py`."""
    seconds = {side: [one["seconds"] for one in segments] for side, segments in found["segments"].items()}
    waited = [one["waited_s"] / one["seconds"] for one in found["segments"]["copied"]]
    same = _ratios(seconds["plain again"], seconds["plain"])
    beyond = [100 * (1 - 1 / ratio) for ratio in _ratios(seconds["copied"], seconds["held"])]
    return {
        "loading_parameters": Figure(value=found["parameters"], unit="parameters"),
        "loading_step_ms": Figure(value=1e3 * statistics.median(seconds["copied"]) / found["steps"], unit="ms"),
        "loading_batches_differing": Figure(value=found["differing"], unit="batches", bar="<= 0"),
        "loading_pairs": Figure(value=len(same), unit="pairs"),
        "loading_steps_of_segment": Figure(value=found["steps"], unit="steps"),
        "copied_over_plain": Figure(
            value=statistics.median(_ratios(seconds["copied"], seconds["plain"])), unit="ratio"
        ),
        "plain_over_plain": Figure(value=statistics.median(same), unit="ratio"),
        "plain_over_plain_spread": Figure(value=spread(same), unit="ratio"),
        "data_share_of_step": Figure(value=statistics.median(beyond), unit="% of the step"),
        "host_waits_for_batch": Figure(value=100 * statistics.median(waited), unit="% of the step"),
    }


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range."""
    low, high = np.quantile(values, [0.25, 0.75])
    return float(high - low)


def _ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [mine / theirs for mine, theirs in zip(one, other, strict=True)]


def _make_table(home: Path, model: ModelSize) -> None:
    rows = min(32_768, _ROWS_BYTES // (4 * model.length)) // model.batch * model.batch
    tokens = np.random.default_rng(0).integers(0, model.vocab_size, size=rows * model.length, dtype=np.int32)
    offsets = np.arange(0, (rows + 1) * model.length, model.length, dtype=np.int32)
    table = pa.table({"tokens": pa.ListArray.from_arrays(pa.array(offsets), pa.array(tokens))})
    lakehouse = connect(LakehouseConfig().at_home(home))
    lakehouse.create_namespace("src")
    properties = {"write.parquet.row-group-limit": "512"}
    lakehouse.catalog.create_table("src.tokens", table.schema, properties=properties).append(table)
