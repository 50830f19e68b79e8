"""Losses and weights that are NaN or infinite, under `launch.on_nonfinite_loss`."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.finiteness import FinitenessCheck
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.extensions.sharded.distributed_state import DistributedState
from dlac_pipeline.extensions.trainers.trainer_files import TrainerFiles
from dlac_pipeline.lakehouse.errors import LossNotFinite
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from examples.demo.report import write_report
from tests.conftest import Arena


def train(
    arena: Arena,
    losses: dict[int, float],
    *,
    applied: bool | None = None,
    poison: int = 0,
    trainer: bool = False,
    **changes: Any,
) -> int:
    """Train with losses at some steps and NaN weights after `poison`. A `trainer` saves files. Return the last step."""
    spec = arena.spec("r", world_size=1, passes=1, every_steps=5, **changes)
    model = torch.nn.Linear(4, 1)

    def save(folder: Path) -> None:
        with (arena.home / "saved").open("a") as file:
            file.write(f"{run.step}\n")
        torch.save(model.state_dict(), folder / "model.pt")

    with arena.training_run(spec) as run:
        run.restore(TrainerFiles(save, modules={"model": model}) if trainer else dlac.TorchState(model=model))
        for batch in run.batches():
            if batch.step == poison:
                with torch.no_grad():
                    model.weight[0, 1] = float("nan")
            run.step_done(losses.get(batch.step, 1.0), applied=applied if batch.step in losses else None)
    return run.step


@pytest.mark.parametrize("loss", [float("nan"), float("-inf")])
def test_nonfinite_loss_stops_run(arena: Arena, loss: float) -> None:
    """The head is the checkpoint before, and status reports why the run was given up."""
    arena.table(appends=(600,))
    with pytest.raises(LossNotFinite, match="at step 10"):
        train(arena, {10: loss})
    status = run_status(arena.lakehouse, "r")
    assert (status["step"], status["state"]) == (5, "open")
    assert "LossNotFinite" in status["gave_up"]


def test_skipped_step_may_overflow(arena: Arena) -> None:
    """A step that the engine did not apply has changed no weight."""
    arena.table(appends=(600,))
    assert train(arena, {3: float("nan"), 5: float("inf")}, applied=False) == 19
    assert run_status(arena.lakehouse, "r")["state"] == "finished"


@pytest.mark.parametrize(("mode", "trainer"), [("synchronous", False), ("asynchronous", False), ("asynchronous", True)])
def test_nonfinite_weights_are_no_head(arena: Arena, mode: str, trainer: bool) -> None:
    """Weights that became NaN in a step with a finite loss do not get into a checkpoint, nor into files of a trainer."""
    arena.table(appends=(600,))
    with pytest.raises(LossNotFinite, match=r"at step 10, found others in 'model\.weight'"):
        train(arena, {}, poison=10, trainer=trainer, mode=mode)
    assert run_status(arena.lakehouse, "r")["step"] == 5
    assert not trainer or (arena.home / "saved").read_text().split() == ["5"]


@pytest.mark.parametrize(("index", "refused"), [(1, False), (2, True), (3, True), (4, False)])
def test_only_weights_are_checked(index: int, refused: bool) -> None:
    """Only the numbers of a weight are checked, not others in its storage."""
    storage = torch.zeros(8)
    storage[index] = float("nan")
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight = torch.nn.Parameter(storage[2:4].view(1, 2))
    check = FinitenessCheck("r", "stop", warn=lambda _: None).weights_of(dlac.TorchState(model=model), 1)
    with pytest.raises(LossNotFinite, match=r"'model\.weight'") if refused else nullcontext():
        check.finish()


def test_weights_of_all_parts_are_checked() -> None:
    """Weights that an engine saves in another form, on another rank, or beside a sharded model are checked, too."""
    other = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Linear(2, 1))
    for name, parameter in other.named_parameters():
        torch.nn.init.constant_(parameter, float("inf") if "bias" in name else 1.0)
    check = FinitenessCheck("r", "stop", warn=lambda _: None).weights_of(dlac.TorchState(other=other), 1)
    with pytest.raises(LossNotFinite, match=r"'other\.0\.bias'"):
        check.finish()
    beside = DistributedState(model=torch.nn.Linear(4, 1), average=other)
    with pytest.raises(LossNotFinite, match=r"'average\.0\.bias'"):
        FinitenessCheck("r", "stop", warn=lambda _: None).check_weights(beside, 1)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_largest_numbers_are_finite(kind: torch.dtype) -> None:
    """Their sum is infinite. Complex numbers are checked, too."""
    model = torch.nn.Linear(4, 1, dtype=kind)
    torch.nn.init.constant_(model.weight, torch.finfo(kind).max)
    check = FinitenessCheck("r", "stop", warn=lambda _: None)
    check.check_weights(dlac.TorchState(model=model), 1)
    torch.nn.init.constant_(model.weight, float("-inf"))
    with pytest.raises(LossNotFinite, match=r"'model\.weight'"):
        check.check_weights(dlac.TorchState(model=model), 1)


@pytest.mark.slow
def test_warn_trains_on(arena: Arena) -> None:
    """The run finishes, and reports and status can still be read by strict programs."""
    arena.table(appends=(600,))
    assert train(arena, {19: float("nan"), 7: float("inf")}, on_nonfinite_loss="warn") == 19
    assert run_status(arena.lakehouse, "r")["state"] == "finished"
    write_report(arena.lakehouse, {"reference": "r", "faulty": "r"}, arena.home / "report", {})
    text = (arena.home / "report" / "report.json").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"found {name}"))


def test_supervisor_does_not_relaunch_nan(arena: Arena) -> None:
    """The run ends after one attempt with a specific exit status, no quarantined row, and one row with the reason."""
    arena.table(appends=(600,))
    launch = arena.launch(arena.spec("r", passes=1, every_steps=5, nan_from=8))
    assert launch.wait() == LossNotFinite.exit_code, launch.stderr
    assert len(launch.of("attempt")) == 1
    assert not launch.of("quarantine")
    assert [each.outcome for each in recoveries_of(arena.lakehouse, "r")] == ["gave up"]
    assert run_status(arena.lakehouse, "r")["step"] == 5


_POISONED = {
    "FSDP2": """
import sys, torch, dlac_pipeline as dlac
from torch.distributed.fsdp import fully_shard
with dlac.training_run(sys.argv[1]) as run:
    model = torch.nn.Linear(4, 4)
    fully_shard(model)
    run.restore(dlac.DistributedState(model=model))
    for batch in run.batches():
        with torch.no_grad():
            model(torch.ones(1, 4))  # leaves gathered weights, which the save of the state frees
        if batch.step == 10:
            model.reshard()
            if run.rank == 1:
                torch.nn.init.constant_(model.weight.to_local(), float("nan"))
        run.step_done(1.0)
""",
    "ZeRO 3": """
import sys, deepspeed, torch, dlac_pipeline as dlac
adam = {"type": "AdamW", "params": {"torch_adam": True}}
config = {"train_micro_batch_size_per_gpu": 1, "optimizer": adam, "zero_optimization": {"stage": 3}}
with dlac.training_run(sys.argv[1]) as run:
    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 3), config=config)
    run.restore(engine)
    for batch in run.batches():
        weight = engine.module.weight
        if run.rank == 1:  # the last element is none of the weight: 9 are divided among two ranks
            weight.ds_tensor[-1 if batch.step < 10 else 0] = float("nan")
        run.step_done(1.0)
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", _POISONED)
def test_other_ranks_verdict_is_recorded(arena: Arena, engine: str) -> None:
    """Without a supervisor rank 0 records that the run is given up, also if the NaN is in the weights of rank 1."""
    arena.table(appends=(600,))
    path, script = arena.home / "r.yaml", arena.home / "poisoned.py"
    path.write_text(yaml.safe_dump(arena.spec("r", passes=1, every_steps=5, mode="asynchronous").model_dump()))
    script.write_text(_POISONED[engine])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "DLAC_HOME": str(arena.home), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ended = subprocess.run(
        [*torchrun, str(script), str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode != 0
    assert [each.outcome for each in recoveries_of(arena.lakehouse, "r")] == ["gave up"], ended.stderr[-3000:]
    assert "LossNotFinite" in run_status(arena.lakehouse, "r")["gave_up"]
    assert run_status(arena.lakehouse, "r")["step"] == 5
