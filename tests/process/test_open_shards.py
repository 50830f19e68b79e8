"""Checkpoints of sharded state that other programs open, and checkpoints from earlier versions."""

import json
import os
import subprocess
import sys
import tarfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from dlac_pipeline import TorchState
from dlac_pipeline.checkpoint.stage.copies import Direct
from dlac_pipeline.extensions.exchange.export import write_state_folder
from dlac_pipeline.extensions.exchange.foreign import foreign_checkpoint
from dlac_pipeline.extensions.exchange.weights import state_of
from dlac_pipeline.lakehouse.errors import CheckpointError
from tests.engine_ranks import Saved, assert_same, run_ranks, save
from tests.ports import own_port

pytestmark = pytest.mark.timeout(900)  # each test starts several processes several times
READER = Path(__file__).parents[1] / "programs" / "read_shards.py"
OLDER = Path(__file__).parents[1] / "shards" / "format-1.tar.xz"
"""What two ranks under FSDP2 saved in the first format, and the state that they had."""


def expected_tensors(saved: Saved) -> dict[str, torch.Tensor]:
    """Return the saved tensors by the names that `DistributedState` gives them."""
    moments = ("exp_avg", "exp_avg_sq", "step")
    return {
        f"optimizer.state.{name}" if name.endswith(moments) else f"model.{name}": tensor
        for name, tensor in saved.state["tensors"].items()
    }


def read_without_dlac(folder: Path, world_size: int, dump: Path) -> dict[str, torch.Tensor]:
    """Return the tensors that ranks without DLAC read."""
    common = {**os.environ, "WORLD_SIZE": str(world_size), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(own_port())}
    command = [sys.executable, str(READER), str(folder), str(dump)]
    variables = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world_size)]
    ranks = [subprocess.Popen(command, env=each, stderr=subprocess.PIPE, text=True) for each in variables]
    stderr = [rank.communicate(timeout=240)[1] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), stderr
    found: dict[str, torch.Tensor] = torch.load(dump, weights_only=True)
    return found


def assert_equal_tensors(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that all tensors are equal, bit for bit."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["fsdp2", pytest.param("ddp", marks=pytest.mark.soak)])
def test_torch_reads_shards_without_dlac(tmp_path: Path, engine: str) -> None:
    """Two ranks, in which an import of DLAC raises, load what 2 ranks saved. The files have the state, and no more."""
    saved = save(tmp_path, 2, engine=engine, writer="copies")
    expected = expected_tensors(saved)
    assert_equal_tensors(read_without_dlac(saved.folder, 2, tmp_path / "read"), expected)
    shards: defaultdict[str, dict[int, torch.Tensor]] = defaultdict(dict)
    for path in sorted(saved.folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:  # safetensors alone puts the tensors together, by the places in the headers
            places = json.loads(file.metadata()["DCP_SHARDING_INFO"])
            for name in file.keys():  # noqa: SIM118  # it is no dict
                first = (places[name]["saved_offsets"] or [0])[0]
                shards[name][first] = file.get_tensor(name)
    joined = {
        name: parts[0] if len(parts) == 1 else torch.cat([parts[first] for first in sorted(parts)])
        for name, parts in shards.items()
    }
    assert_equal_tensors(joined, expected)


@pytest.mark.soak
@pytest.mark.parametrize(
    "request_", [{"engine": "zero3"}, {"engine": "zero1", "frozen": True}, {"engine": "zero2", "frozen": True}]
)
def test_zero_state_moves_to_fsdp2(tmp_path: Path, request_: dict[str, Any]) -> None:
    """What 2 ranks saved with ZeRO is exported, read by 1 rank without DLAC, adopted, and loaded by 2 ranks under FSDP2."""
    saved = save(tmp_path, 2, **request_)
    (scratch := tmp_path / "scratch").mkdir()
    (adopted := tmp_path / "adopted").mkdir()
    write_state_folder(state_of("deepspeed", saved.folder, scratch=scratch), tmp_path / "state", {})
    steps = {
        f"{name.rpartition('.')[0]}.step": torch.tensor(3.0) for name in saved.state["tensors"] if "exp_avg" in name
    }
    saved.state["tensors"] |= steps | saved.state["buffers"]
    expected = expected_tensors(saved)
    assert_equal_tensors(read_without_dlac(tmp_path / "state", 1, tmp_path / "read"), expected)
    with warnings.catch_warnings(action="ignore"):  # of torch, in a process without ranks
        foreign_checkpoint(tmp_path / "state").copy(adopted, Direct().write)
    common = {"do": "load", "engine": "fsdp2", "folder": adopted, "saved_world_size": 1, "after": 3}
    frozen = request_.get("frozen", False)
    trained, loaded = (run_ranks(2, tmp_path / "loaded.pt", **common, frozen=frozen, steps=steps) for steps in (2, 0))
    assert not any(trained.codes + loaded.codes), (trained.stderr, loaded.stderr)
    assert_equal_tensors(loaded.state["tensors"], saved.state["tensors"])


def test_state_without_names_is_refused(tmp_path: Path) -> None:
    """The optimizers of `TorchState` and of ZeRO 0 number the parameters."""
    TorchState(model=torch.nn.Linear(2, 1)).save(tmp_path, Direct().write)
    with pytest.raises(CheckpointError, match="found one of 'torch', whose optimizer does not know the names"):
        state_of("torch", tmp_path, scratch=tmp_path)


@pytest.mark.parametrize(
    "world_size", [1, pytest.param(2, marks=pytest.mark.soak), pytest.param(4, marks=pytest.mark.soak)]
)
def test_first_shard_format_is_loaded(tmp_path: Path, world_size: int) -> None:
    """Parameters, optimizer, groups, buffers and schedule are as version 0.1 saved them, bit for bit."""
    with tarfile.open(OLDER) as archive:
        archive.extractall(tmp_path, filter="data")
    saved = {"engine": "fsdp2", "folder": tmp_path / "checkpoint", "saved_world_size": 2, "after": 3}
    loaded = run_ranks(world_size, tmp_path / "loaded.pt", do="load", **saved)
    assert not any(loaded.codes), loaded.stderr
    assert_same(loaded.state, torch.load(tmp_path / "saved.pt", weights_only=False))
