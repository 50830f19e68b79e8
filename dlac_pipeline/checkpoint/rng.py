"""The random number generators of a rank: part of the checkpoint, or derived from (seed, step, rank) where there is none."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlac_pipeline.checkpoint.engines.safe_load import load_tensors
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.plan.cut import derive_key


def rng_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's generators."""
    return folder / f"rng-{rank:05d}.pt"


def save_rng(folder: Path, rank: int, write: Write) -> None:
    """Save the generators of this rank."""
    write(rng_file(folder, rank), rng_state())


def rng_state() -> dict[str, Any]:
    """Return the state of Python's, NumPy's and PyTorch's generators, accelerators included."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    python_keys, numpy_keys = (torch.from_numpy(np.asarray(each, dtype=np.int64)) for each in (internal, keys))
    devices, module = _accelerators()
    states = [module.get_rng_state(device) for device in devices] if hasattr(module, "get_rng_state") else []
    return {
        "python": [version, python_keys, gauss],
        "numpy": [str(name), numpy_keys, int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        **({devices[0].type: states} if states else {}),
    }


def load_rng(folder: Path, rank: int) -> None:
    """Restore what `save_rng` saved. Raises as `load_tensors`."""
    set_rng_state(load_tensors(rng_file(folder, rank)))


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Set all generators to what `rng_state` returned."""
    version, internal, gauss = state["python"]
    numbers = internal.tolist() if isinstance(internal, torch.Tensor) else internal  # before, it was a list
    random.setstate((version, tuple(numbers), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    devices, module = _accelerators()
    # Fewer accelerators than saved are allowed. Those of another type keep their own state.
    for device, generator in zip(devices, state.get(devices[0].type, []) if devices else [], strict=False):
        module.set_rng_state(generator, device)


def _accelerators() -> tuple[list[torch.device], Any]:
    """Return this node's accelerators, and PyTorch's module for them, or neither."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [], None
    devices = [torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())]
    return devices, torch.get_device_module(accelerator)


def seed_rng(seed: int, step: int, rank: int) -> None:
    """Seed all generators of this rank from (seed, step, rank)."""
    key = derive_key(seed, step, rank)
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key % 2**63)
