"""The random number generators of a rank, as a checkpoint keeps them."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from dlac_pipeline.checkpoint.rng import load_rng, save_rng, seed_rng
from dlac_pipeline.checkpoint.stage.copies import Direct


def drawn() -> list[float]:
    """The next number of each generator."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_generators_go_on_where_they_were_saved(tmp_path: Path) -> None:
    """All of them, whatever was drawn in between."""
    seed_rng(1, 2, 3)
    save_rng(tmp_path, 0, Direct().write)
    expected = drawn()
    assert drawn() != expected
    load_rng(tmp_path, 0)
    assert drawn() == expected
