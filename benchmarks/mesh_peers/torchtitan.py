"""torchtitan's text loader over Parquet files, one source or several. Each text is a sample."""

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import (
    DATASETS,
    HFDataSource,
    HuggingFaceTextDataLoader,
    InterleavedHuggingFaceTextDataLoader,
)

from benchmarks.mesh_peers.cases import MICRO_BATCH

_load_dataset = importlib.import_module("datasets").load_dataset
LENGTH = 8
logging.disable(logging.WARNING)


class _Tokenizer:
    """Tokens of a text, so many that each is one sample."""

    def encode(self, text: str, **_: bool) -> list[int]:
        """Return the text's number, one time more than a sample has tokens."""
        return [int(text)] * (LENGTH + 1)


def write(folder: Path, source: str, rows: range) -> None:
    """Add a file with the rows."""
    (folder / source).mkdir(exist_ok=True)
    path = folder / source / f"part-{rows.start:06}.parquet"
    pq.write_table(pa.table({"text": [str(row) for row in rows]}), path)


def open_rank(folder: Path, weights: dict[str, float], rank: int, ranks: int, state: Any) -> "_Rank":
    """Return the loader of a rank."""
    return _Rank(folder, weights, rank, ranks, state)


def reshard(states: list[Any], ranks: int) -> list[Any]:
    """Return the states of a distributed checkpoint: each rank finds its own by its name."""
    merged = {name: value for state in states for name, value in state.items()}
    return [merged] * ranks


class _Rank:
    def __init__(self, folder: Path, weights: dict[str, float], rank: int, ranks: int, state: Any) -> None:
        for name in weights:
            files = sorted(map(str, (folder / name).glob("*.parquet")))
            DATASETS[name] = DatasetConfig(
                path=name,
                loader=lambda _, files=files: _load_dataset("parquet", data_files=files, split="train"),
                sample_processor=lambda sample: sample["text"],
            )
        common = {
            "dp_world_size": ranks,
            "dp_rank": rank,
            "tokenizer": _Tokenizer(),
            "seq_len": LENGTH,
            "local_batch_size": MICRO_BATCH,
        }
        if len(weights) == 1:
            config = HuggingFaceTextDataLoader.Config(dataset="one", infinite=False)
            self._loader = HuggingFaceTextDataLoader(config, **common)
        else:
            sources = [HFDataSource(dataset=name, weight=weight, infinite=True) for name, weight in weights.items()]
            self._loader = InterleavedHuggingFaceTextDataLoader(
                InterleavedHuggingFaceTextDataLoader.Config(sources=sources), **common
            )
        if state is not None:
            self._loader.load_state_dict(state)

    def __iter__(self) -> Iterator[list[int]]:
        for inputs, _ in self._loader:
            yield inputs["input"][:, 0].tolist()

    def state(self) -> Any:
        return self._loader.state_dict()
