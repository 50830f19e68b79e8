"""Engines in real processes: what a checkpoint holds comes back, in any number of ranks, and nothing in it is run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from catalog.errors import CheckpointUnsafe
from dlac_pipeline import TorchState
from dlac_pipeline.checkpoint.rng import load_rng, rng_file
from dlac_pipeline.checkpoint.writing import Direct
from tests.engine_ranks import Saved, assert_same, save

ZERO = [
    ("zero0", "fp32"),
    ("zero0", "bf16"),
    ("zero0", "fp16"),
    ("zero1", "fp32"),
    ("zero1", "bf16"),
    ("zero1", "fp16"),
    ("zero2", "fp32"),
    ("zero2", "bf16"),
    ("zero3", "fp32"),
    ("zero3", "bf16"),
    ("zero3", "fp16"),
]


class Touch:
    """Loading this runs a command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


def check_resizes(saved: Saved, *world_sizes: int) -> None:
    """Loaded by so many ranks it is the state that was saved, and training goes on as it would have."""
    for world_size in world_sizes:
        loaded = saved.load(world_size)
        assert not any(loaded.codes), loaded.said
        assert_same(loaded.state, saved.state)


def test_fsdp2_is_loaded_by_fewer_ranks(tmp_path: Path) -> None:
    """Copied while training goes on, from 2 ranks to 1: parameters, optimizer, groups, buffers and schedule, bit for bit."""
    saved = save(tmp_path, 2, engine="fsdp2", writer="copies")
    assert sorted(path.name for path in saved.folder.iterdir()) == [
        "shards-00000.pt",
        "shards-00001.pt",
        "shards-index.pt",
        "torch-state.pt",
    ]
    check_resizes(saved, 1)


def test_zero_1_is_converted_for_fewer_ranks_once(tmp_path: Path) -> None:
    """From 2 ranks to 1, a frozen layer and buffers included; the second load uses the conversion that is there."""
    saved = save(tmp_path, 2, engine="zero1", writer="copies", frozen=True)
    check_resizes(saved, 1)
    made = tmp_path / "converted" / saved.folder.name
    record = (made / "conversion.json").stat()
    check_resizes(saved, 1)
    assert (made / "conversion.json").stat().st_ino == record.st_ino
    assert [path.name for path in (tmp_path / "converted").iterdir() if path.is_dir()] == [saved.folder.name]


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "precision"), ZERO)
@pytest.mark.parametrize("writer", ["direct", "copies"])
def test_every_deepspeed_state_is_loaded_by_any_number_of_ranks(
    tmp_path: Path, engine: str, precision: str, writer: str
) -> None:
    """2 -> 2, 1, 4 ranks: parameters, optimizer, groups, buffers, schedule, steps and loss scale, bit for bit."""
    saved = save(tmp_path, 2, engine=engine, precision=precision, writer=writer)
    if precision == "fp16":
        assert saved.state["loss_scale"] != {"scale": 2**8, "at": 0}
    check_resizes(saved, 2, 1, 4)


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
@pytest.mark.parametrize("writer", ["direct", "copies"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_every_pytorch_state_is_loaded_by_any_number_of_ranks(
    tmp_path: Path, engine: str, writer: str, world_size: int
) -> None:
    """From and to 1, 2 and 4 ranks, of which some own no row of a layer."""
    check_resizes(save(tmp_path, world_size, engine=engine, writer=writer), 1, 2, 4)


@pytest.mark.soak
def test_frozen_parameters_at_zero_3_are_refused(tmp_path: Path) -> None:
    """DeepSpeed would leave them as they were initialized: every rank says so instead, and the same number still loads."""
    saved = save(tmp_path, 2, engine="zero3", frozen=True)
    refused = saved.load(4)
    assert all("WorldSizeUnsupported" in said for said in refused.said)
    check_resizes(saved, 2)


@pytest.mark.parametrize(("engine", "world_size"), [("zero1", 2), pytest.param("zero1", 1, marks=pytest.mark.soak)])
def test_code_in_a_deepspeed_file_is_refused_by_every_rank(tmp_path: Path, engine: str, world_size: int) -> None:
    """A file that would run a command when it is loaded as DeepSpeed loads it, or converts it: named, and not run."""
    saved = save(tmp_path, 2, engine=engine)
    path = saved.folder / "deepspeed" / "mp_rank_00_model_states.pt"
    state = torch.load(path, weights_only=True)
    torch.save({**state, "extra": Touch(tmp_path / "was-run")}, path)
    refused = saved.load(world_size)
    assert all("CheckpointUnsafe" in said for said in refused.said), refused.said
    assert not (tmp_path / "was-run").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "was-run").exists()  # it would have


def test_code_in_a_file_of_pytorch_state_is_refused(tmp_path: Path) -> None:
    """Also where random number generators are kept."""
    state = TorchState(model=torch.nn.Linear(2, 2))
    state.save(tmp_path, Direct().write)
    for path in (tmp_path / "torch-state.pt", rng_file(tmp_path, 0)):
        torch.save({"model": Touch(tmp_path / "was-run")}, path)
    with pytest.raises(CheckpointUnsafe, match="torch-state"):
        state.load(tmp_path, saved_world_size=1)
    with pytest.raises(CheckpointUnsafe, match="rng-00000"):
        load_rng(tmp_path, 0)
    assert not (tmp_path / "was-run").exists()
