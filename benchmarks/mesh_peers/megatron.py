"""Megatron-core's GPT datasets below the sampler of Megatron-Bridge, which is that of Megatron-LM.

The sampler's module is loaded alone, because its package imports models. The state is the number of consumed samples.
"""

import importlib.util
import logging
from collections.abc import Iterator
from importlib.metadata import distribution
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path
from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

from benchmarks.mesh_peers.cases import AFTER, BEFORE, MICRO_BATCH, STEP

LENGTH = 8
logging.disable(logging.WARNING)


def _samplers() -> Any:
    path = distribution("megatron-bridge").locate_file("megatron/bridge/data/samplers.py")
    spec = importlib.util.spec_from_file_location("samplers", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_SAMPLERS = _samplers()


class _Tokenizer(NullTokenizer):  # type: ignore[misc]  # Megatron-core has no types
    eod, pad = 100_000, -1


def write(folder: Path, source: str, rows: range) -> None:
    """Write the source again, with the rows after those that it has: its files take no more."""
    prefix = folder / source
    listed = prefix.with_suffix(".rows")
    known = [*np.loadtxt(listed, dtype=int, ndmin=1)] if listed.exists() else []
    np.savetxt(listed, [*known, *rows], fmt="%d")
    builder = IndexedDatasetBuilder(get_bin_path(str(prefix)), dtype=np.int32)
    for row in [*known, *rows]:
        builder.add_document(np.full(LENGTH, row, np.int32), [LENGTH])
    builder.finalize(get_idx_path(str(prefix)))


def open_rank(folder: Path, weights: dict[str, float], rank: int, ranks: int, state: Any) -> "_Rank":
    """Return the loader of a rank."""
    return _Rank(folder, weights, rank, ranks, state or 0)


def reshard(states: list[Any], ranks: int) -> list[Any]:
    """Return the number of consumed samples, which all ranks have."""
    return [states[0]] * ranks


class _Rank:
    def __init__(self, folder: Path, weights: dict[str, float], rank: int, ranks: int, consumed: int) -> None:
        prefixes = [str(folder / name) for name in weights]
        rows = len(np.loadtxt(folder / "one.rows", dtype=int)) if len(weights) == 1 else BEFORE + AFTER
        config = GPTDatasetConfig(
            random_seed=5,
            sequence_length=LENGTH,
            blend=(prefixes, [*weights.values()] if len(weights) > 1 else None),
            split="1,0,0",
            tokenizer=_Tokenizer(2000),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            add_extra_token_to_sequence=False,
        )
        dataset = BlendedMegatronDatasetBuilder(GPTDataset, [rows, 0, 0], lambda: True, config).build()[0]
        self._loader = _SAMPLERS.build_pretraining_data_loader(
            dataset,
            consumed,
            "single",
            MICRO_BATCH,
            0,
            data_sharding=False,
            pin_memory=False,
            data_parallel_rank=rank,
            data_parallel_size=ranks,
        )
        self._of_step = STEP // MICRO_BATCH // ranks
        self._consumed, self._batches = consumed, 0

    def __iter__(self) -> Iterator[list[int]]:
        for batch in islice(self._loader, None):
            self._batches += 1
            yield batch["tokens"][:, 0].tolist()

    def state(self) -> int:
        return self._consumed + self._batches // self._of_step * STEP
