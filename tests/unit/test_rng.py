"""The random number generators of a rank, as saved in a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from dlac_pipeline.checkpoint.rng import load_rng, save_rng, seed_rng
from dlac_pipeline.checkpoint.stage.copies import Direct


def draw() -> list[float]:
    """Draw the next number of each generator."""
    return [random.random(), float(np.random.random()), float(torch.rand(()))]


def test_generators_resume_where_saved(tmp_path: Path) -> None:
    """Each generator resumes, whatever was drawn between the save and the restore."""
    seed_rng(1, 2, 3)
    save_rng(tmp_path, 0, Direct().write)
    expected = draw()
    assert draw() != expected
    load_rng(tmp_path, 0)
    assert draw() == expected
