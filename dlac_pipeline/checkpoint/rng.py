"""The random number generators of a rank: part of the checkpoint, or derived from (seed, step, rank) where there is none."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from dlac_pipeline.checkpoint.engines.safe_load import load_tensors
from dlac_pipeline.checkpoint.writing import Write
from dlac_pipeline.plan.keys import derive_key


def rng_file(folder: Path, rank: int) -> Path:
    """Where a rank's generators are saved."""
    return folder / f"rng-{rank:05d}.pt"


def save_rng(folder: Path, rank: int, write: Write) -> None:
    """Save Python's, NumPy's and PyTorch's generators of this rank."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "python": [version, list(internal), gauss],
        "numpy": [
            str(name),
            torch.from_numpy(np.asarray(keys, dtype=np.int64)),
            int(position),
            int(has_gauss),
            float(cached),
        ],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    write(rng_file(folder, rank), state)


def load_rng(folder: Path, rank: int) -> None:
    """Restore what `save_rng` saved.

    Raises:
        CheckpointUnsafe: there is more in it than tensors and plain values.
    """
    state = load_tensors(rng_file(folder, rank))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    for device, generator in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
        torch.cuda.set_rng_state(generator, device)  # there may be fewer here than where it was saved


def seed_rng(seed: int, step: int, rank: int) -> None:
    """Seed all generators of this rank from (seed, step, rank)."""
    key = derive_key(seed, step, rank)
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key % 2**63)
