"""Engines in real processes: a checkpoint is restored by any number of ranks, and code in it is never run."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from dlac_pipeline import TorchState
from dlac_pipeline.checkpoint.engines import Engine, adapt
from dlac_pipeline.checkpoint.rng import load_rng, rng_file
from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, Direct, Writer
from dlac_pipeline.extensions.sharded.distributed_state import DistributedState
from dlac_pipeline.lakehouse.errors import CheckpointError, CheckpointUnsafe, FormatTooNew, ScriptInvalid, SpecInvalid
from tests.engine_ranks import STEPS, Saved, assert_same, run_program, save

pytestmark = pytest.mark.timeout(900)  # each test starts several processes several times

ZERO = [
    (f"zero{stage}", precision)
    for stage in range(4)
    for precision in ("fp32", "bf16", "fp16")
    if (stage, precision) != (2, "fp16")
]


class Touch:
    """An object whose loading runs a command."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self._path}",)


def check_resizes(saved: Saved, *world_sizes: int) -> None:
    """Check that ranks of each world size load the saved state and continue training as the saving ranks would have."""
    for world_size in world_sizes:
        loaded = saved.load(world_size)
        assert not any(loaded.codes), loaded.stderr
        assert_same(loaded.state, saved.state)


def test_fsdp2_is_loaded_by_fewer_ranks(tmp_path: Path) -> None:
    """A state copied during training goes from 2 ranks to 1: parameters, optimizer, groups, buffers and schedule, bit for bit."""
    saved = save(tmp_path, 2, engine="fsdp2", writer="copies")
    assert sorted(path.name for path in saved.folder.iterdir()) == [
        *("buffers-00000.pt", "buffers-00001.pt", "shard-00001-model-00001-of-00001.safetensors"),
        *("shard-00002-model-00001-of-00001.safetensors", "shards-00001.pt", "shards-index.pt", "torch-state.pt"),
    ]
    check_resizes(saved, 1)


def test_state_without_gradients_is_loaded(tmp_path: Path) -> None:
    """A sharded layer that no step used has no moments, and comes back without them."""
    check_resizes(save(tmp_path, 2, engine="fsdp2", unused=True), 1)


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "precision"), ZERO)
@pytest.mark.parametrize("writer", ["direct", "copies"])
def test_deepspeed_state_loads_at_any_size(tmp_path: Path, engine: str, precision: str, writer: str) -> None:
    """2 ranks -> 2, 1 and 4: parameters, optimizer, groups, buffers, schedule, steps and loss scale, bit for bit."""
    saved = save(tmp_path, 2, engine=engine, precision=precision, writer=writer)
    if precision == "fp16":
        assert saved.state["loss_scale"] != {"scale": 2**8, "at": 0}
    check_resizes(saved, 2, 1, 4)


@pytest.mark.soak
@pytest.mark.parametrize("engine", ["fsdp2", "ddp"])
@pytest.mark.parametrize("writer", ["direct", "copies"])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_pytorch_state_loads_at_any_size(tmp_path: Path, engine: str, writer: str, world_size: int) -> None:
    """The state is loaded from and by 1, 2 and 4 ranks, some of which own no row of a layer."""
    check_resizes(save(tmp_path, world_size, engine=engine, writer=writer), 1, 2, 4)


@pytest.mark.soak
@pytest.mark.parametrize(
    "what",
    [
        {"engine": "zero3", "frozen": True},
        *(
            {"engine": engine, "optimizer": optimizer}
            for engine in ("zero1", "zero2", "zero3")
            for optimizer in ("momentum", "amsgrad", "nadam")
        ),
    ],
)
def test_unconvertible_state_is_refused_by_all(tmp_path: Path, what: dict[str, Any]) -> None:
    """The error names frozen parameters at ZeRO 3 and optimizers without Adam's moments. The same number of ranks still loads."""
    saved = save(tmp_path, 2, **what)
    refused = saved.load(4)
    assert all("WorldSizeUnsupported" in stderr for stderr in refused.stderr), refused.stderr
    check_resizes(saved, 2)


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "world_size"), [("zero1", 2), ("zero1", 1)])
def test_code_in_deepspeed_file_is_refused(tmp_path: Path, engine: str, world_size: int) -> None:
    """A file with code that DeepSpeed's loading or conversion would run is named, and its code is not run."""
    saved = save(tmp_path, 2, engine=engine)
    path = saved.folder / "deepspeed" / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path, weights_only=True), "extra": Touch(tmp_path / "was-run")}, path)
    refused = saved.load(world_size)
    assert all("CheckpointUnsafe" in stderr for stderr in refused.stderr), refused.stderr
    assert not (tmp_path / "was-run").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "was-run").exists()  # without the check it is run


@pytest.mark.parametrize(
    "engine", ["fsdp2", *(pytest.param(each, marks=pytest.mark.soak) for each in ("ddp", "zero1", "zero2", "zero3"))]
)
def test_failed_write_blocks_no_rank(tmp_path: Path, engine: str) -> None:
    """The save raises on one rank and returns on further ones. All ranks continue training, and the vote prevents the commit."""
    saved = save(tmp_path, 2, engine=engine, full_rank=1)
    of_rank_1 = ("shard-00002", "shards-00001", "rank_1")
    assert not any(each in path.name for path in saved.folder.rglob("*") for each in of_rank_1)
    assert len(saved.state["losses"]) == STEPS + 2


OWN_BUFFERS = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import BatchNorm1d
from torch.nn.parallel import DistributedDataParallel
import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.engines import adapt, prepare_engines
from dlac_pipeline.checkpoint.stage.copies import Direct

CONFIG = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 1}, "zero_allow_untested_optimizer": True}

def wrap(model):
    if sys.argv[2] != "deepspeed":
        return DistributedDataParallel(model, broadcast_buffers=False)
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters()), config=CONFIG)[0]

def engine_of(wrapped):
    return adapt(wrapped) if sys.argv[2] == "deepspeed" else getattr(dlac, sys.argv[2])(model=wrapped)

dist.init_process_group("gloo")
if sys.argv[2] == "deepspeed":
    import deepspeed
    prepare_engines()
rank, folder = dist.get_rank(), Path(sys.argv[1])
layers = lambda: (torch.nn.Linear(2, 2), BatchNorm1d(2), checkpoint_wrapper(BatchNorm1d(2)))
models = [torch.nn.Sequential(*layers()) for _ in range(2)]
first, again = map(wrap, models)
loss = first(torch.arange(8.0).reshape(4, 2) * (rank + 1)).sum()
first.backward(loss) if sys.argv[2] == "deepspeed" else loss.backward()
first.step() if sys.argv[2] == "deepspeed" else None
engine_of(first).save(folder, Direct().write)
dist.barrier()
engine_of(again).load(folder, saved_world_size=2)
for name, value in models[0].state_dict().items():
    assert torch.equal(models[1].state_dict()[name], value), name
means = [torch.zeros(2) for _ in range(2)]
dist.all_gather(means, models[1][1].running_mean)
assert not torch.equal(*means)
dist.destroy_process_group()
"""


def run_text(folder: Path, program: str, *arguments: str) -> None:
    """Run a program with two ranks, which must succeed."""
    path = folder / "program.py"
    path.write_text(program)
    ranks = run_program(2, str(path), str(folder), *arguments)
    assert not any(ranks.codes), ranks.stderr


@pytest.mark.parametrize(
    "engine", ["TorchState", "DistributedState", pytest.param("deepspeed", marks=pytest.mark.slow)]
)
def test_buffers_of_ranks_are_restored(tmp_path: Path, engine: str) -> None:
    """Each rank gets its own running mean of a BatchNorm back, also in a wrapper, where DeepSpeed saves the first rank's."""
    run_text(tmp_path, OWN_BUFFERS, engine)


SHARDED_PART = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.stage.copies import Direct
from dlac_pipeline.lakehouse.errors import SpecInvalid

dist.init_process_group("gloo")
model, average = (fully_shard(torch.nn.Linear(2, 2)) for _ in range(2))
try:
    dlac.DistributedState(model=model, average=average).save(Path(sys.argv[1]), Direct().write)
except SpecInvalid as err:
    assert "in the part 'average', found sharded" in str(err), err
else:
    assert dist.get_rank() == 1
optimizer = torch.optim.SGD(model.parameters())
optimizer.state[model.weight]["own"] = (torch.zeros(1, 2), 3)
try:
    dlac.DistributedState(model=model, optimizer=optimizer).save(Path(sys.argv[1]), Direct().write)
except SpecInvalid as err:
    assert "parameter 'weight', found a plain tensor of shape (1, 2)" in str(err), err
else:
    raise AssertionError
dist.barrier()
dist.destroy_process_group()
"""


def test_sharded_part_is_refused(tmp_path: Path) -> None:
    """A second sharded model, or a plain tensor for a shard, would come back with the first rank's at all ranks."""
    run_text(tmp_path, SHARDED_PART)


@pytest.fixture
def sharded(tmp_path: Path) -> Iterator[torch.nn.Module]:
    """A model that this process alone has sharded, after an evaluation."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    fully_shard(model)
    yield model
    dist.destroy_process_group()


@pytest.mark.slow
def test_evaluated_model_is_sharded_again(tmp_path: Path, sharded: torch.nn.Module) -> None:
    """After an evaluation FSDP2 leaves whole parameters in the outermost module. They are no reason for another engine."""
    optimizer = torch.optim.SGD(sharded.parameters(), momentum=0.9)
    with torch.no_grad():
        sharded(torch.ones(1, 2))
    assert not any(isinstance(each, DTensor) for each in sharded.parameters())
    engine = DistributedState(model=sharded, optimizer=optimizer)
    with torch.no_grad():
        sharded(torch.ones(1, 2))
    assert isinstance(adapt(None, model=sharded, optimizer=optimizer), DistributedState)
    late = torch.optim.SGD([torch.nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(ScriptInvalid, match="make the optimizer after fully_shard, before any forward pass"):
        DistributedState(model=sharded, optimizer=late)
    (folder := tmp_path / "checkpoint").mkdir()
    engine.save(folder, Direct().write)
    engine.load(folder, saved_world_size=1)


@pytest.mark.parametrize("kind", ["torch", "dcp"])
@pytest.mark.parametrize("compiled", ["saving", "loading"])
def test_compiled_model_loads_plain_one(tmp_path: Path, kind: str, compiled: str) -> None:
    """A checkpoint has the names of the bare model, so that `torch.compile` may be added or removed."""
    first, again = Parts(), Parts()
    first.train(2)
    changed = first if compiled == "saving" else again
    changed.model = torch.compile(changed.model, backend="eager")  # type: ignore[assignment]  # it has the same interface
    first.engine(kind).save(tmp_path, Direct().write)
    again.engine(kind).load(tmp_path, saved_world_size=1)
    assert [*map(str, again.model.state_dict().values())] == [*map(str, first.model.state_dict().values())]
    assert again.states()[1:] == first.states()[1:]


class Parts:
    """A model after some training on one rank, with all the objects that a script may have."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

    def train(self, steps: int) -> None:
        """Train some steps."""
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.scaler.scale(self.model(torch.randn(8, 4)).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()

    def states(self) -> list[Any]:
        """Return all states for a comparison."""
        parts = (self.model, self.optimizer, self.scheduler, self.scaler)
        return [tree_map_only(torch.Tensor, torch.Tensor.tolist, dict(part.state_dict())) for part in parts]

    def engine(self, kind: str) -> Engine:
        """Return the adapter of the objects."""
        rest = {"scheduler": self.scheduler, "scaler": self.scaler}
        if kind == "torch":
            return TorchState(model=self.model, optimizer=self.optimizer, **rest)
        return DistributedState(model=self.model, optimizer=self.optimizer, **rest)


@pytest.mark.parametrize("kind", ["torch", "dcp"])
def test_change_after_copy_is_not_saved(tmp_path: Path, kind: str) -> None:
    """Parameters, optimizer, schedule and loss scale are restored as they were when the save returned (pytorch#144657)."""
    parts = Parts()
    parts.train(3)
    expected, copies = parts.states(), Copies(CopyMemory())
    parts.engine(kind).save(tmp_path, copies.write)
    copies.handed_over()
    parts.train(3)
    assert parts.states() != expected
    copies.finish()
    again = Parts()
    again.engine(kind).load(tmp_path, saved_world_size=1)
    assert again.states() == expected
    assert again.scaler.get_scale() == 32.0


@pytest.mark.parametrize(
    ("kind", "place"), [("torch", r"optimizer\['param_groups'\]\[0\]\['table'\]"), ("dcp", r"optimizer.*table")]
)
@pytest.mark.parametrize("writing", ["direct", "copies"])
def test_unloadable_state_is_not_saved(tmp_path: Path, kind: str, place: str, writing: str) -> None:
    """An array in the optimizer's settings and an object in a part's state are named with their places, and not written."""
    writer: Writer = Direct() if writing == "direct" else Copies(CopyMemory())
    parts = Parts()
    parts.train(1)
    parts.optimizer.param_groups[0]["table"] = np.zeros(3)
    with pytest.raises(SpecInvalid, match=rf"found numpy\.ndarray at {place}, .*torch\.from_numpy"):
        parts.engine(kind).save(tmp_path, writer.write)
    del parts.optimizer.param_groups[0]["table"]
    (again := tmp_path / "again").mkdir()
    parts.scheduler.base_lrs = [Touch(tmp_path / "was-run")]  # type: ignore[list-item]  # some scripts do this
    with pytest.raises(SpecInvalid, match=r"Touch at scheduler\['base_lrs'\]\[0\]"):
        parts.engine(kind).save(again, writer.write)
    refused = "torch-state.pt" if kind == "torch" else "shards-00000.pt"
    assert not any(path.exists() for path in (tmp_path / refused, again / "torch-state.pt"))
    assert not (tmp_path / "was-run").exists()


def test_newer_shard_format_is_refused(tmp_path: Path) -> None:
    """The index has the version of the format."""
    parts = Parts()
    parts.engine("dcp").save(tmp_path, Direct().write)
    index = torch.load(tmp_path / "shards-index.pt", weights_only=True)
    torch.save({**index, "format_version": 3}, tmp_path / "shards-index.pt")
    with pytest.raises(FormatTooNew, match="version 3"):
        parts.engine("dcp").load(tmp_path, saved_world_size=1)


def test_other_model_is_refused_by_name(tmp_path: Path) -> None:
    """The error names a parameter that is missing in the checkpoint."""
    Parts().engine("dcp").save(tmp_path, Direct().write)
    with pytest.raises(CheckpointError, match="head"):
        DistributedState(model=torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2)})).load(tmp_path, saved_world_size=1)


@pytest.mark.parametrize("name", ["shards-index.pt", "shards-00000.pt", "torch-state.pt"])
def test_code_in_shard_file_is_refused(tmp_path: Path, name: str) -> None:
    """Code in the index, in shards and in further files is refused."""
    Parts().engine("dcp").save(tmp_path, Direct().write)
    path = tmp_path / name
    parts = torch.load(path, weights_only=True)
    extra = Touch(tmp_path / "was-run")
    torch.save([*parts, extra] if isinstance(parts, list) else {**parts, "extra": extra}, path)
    with pytest.raises(CheckpointUnsafe, match=name):
        Parts().engine("dcp").load(tmp_path, saved_world_size=1)
    assert not (tmp_path / "was-run").exists()


def test_code_in_pytorch_file_is_refused(tmp_path: Path) -> None:
    """Code in the file of random number generators is refused too."""
    state = TorchState(model=torch.nn.Linear(2, 2))
    state.save(tmp_path, Direct().write)
    for path in (tmp_path / "torch-state.pt", rng_file(tmp_path, 0)):
        torch.save({"model": Touch(tmp_path / "was-run")}, path)
    with pytest.raises(CheckpointUnsafe, match="torch-state"):
        state.load(tmp_path, saved_world_size=1)
    with pytest.raises(CheckpointUnsafe, match="rng-00000"):
        load_rng(tmp_path, 0)
    assert not (tmp_path / "was-run").exists()
