"""A survivor writes the state after the last step, with what each rank held: only if nothing has changed since."""

import io
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dlac_pipeline.checkpoint.engines import TorchState
from dlac_pipeline.checkpoint.step_gate import StepGate
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.last_step import LastStep
from tests.memory_states import OWN, STATE, keep


class Rank:
    """A rank with a model whose weights are equal on both ranks."""

    def __init__(self, folder: Path, rank: int, write: Callable[[Path, Any], int]) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.linear, self.norm = torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8)
        self.model = torch.nn.Sequential(self.linear, self.norm)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)
        self.average = torch.nn.Linear(2, 2)
        torch.nn.init.constant_(self.average.weight, rank)  # only rank 0 needs the right one
        self.engine = TorchState(model=self.model, optimizer=self.optimizer, average=self.average)
        self.gate = StepGate(self.engine)
        self.gate.is_sure = True
        self.last = LastStep(folder, self.engine, self.gate, write)

    def step(self) -> None:
        """Change weights, moments and buffers."""
        self.model(torch.ones(2, 4) * torch.arange(2).unsqueeze(1)).sum().backward()
        self.optimizer.step()

    def hold(self, step: int = 13) -> None:
        """Hold a step, with the loss of the rank."""
        random.seed(self.rank)
        part = replace(STATE, step=step, rank=self.rank, world_size=2, files=[], trained=[*STATE.trained])
        self.last.hold(lambda: part, [self.rank + 1.0], step_s=1_000)


@pytest.fixture
def slot(tmp_path: Path) -> Path:
    """The slot for the state, beside a whole state of an earlier step."""
    run = tmp_path / OWN / "run"
    folder = states.attempt_folder(run, 2, "b")
    states.make_folder(folder)
    keep(run, replace(STATE, step=11, files=[]), slot=0)
    return states.slot_of(folder, 1)


def write(path: Path, state: Any) -> int:
    """Write a file of a state."""
    content = io.BytesIO()
    torch.save(state, content)
    return path.write_bytes(content.getvalue())


def steps(slot: Path) -> list[int]:
    """Return the steps of whole states."""
    return [each.first.step for each in states.read_states(slot.parents[1])]


def ranks_of(slot: Path, write: Callable[[Path, Any], int] = write) -> list[Rank]:
    """Return two ranks that hold the step 13."""
    ranks = [Rank(slot.parent, rank, write) for rank in range(2)]
    for each in ranks:
        each.step()
        each.hold()
    return ranks


def test_survivor_writes_what_was_held(slot: Path) -> None:
    """The state has weights of the survivor, and of rank 0 what a script or a forward pass may change before the next step."""
    first, second = ranks_of(slot)
    assert first.norm.running_mean is not None
    mean = first.norm.running_mean.clone()
    second.optimizer.param_groups[0]["lr"] = 0.0
    second.model(torch.rand(3, 4))
    second.last.keep(slot, after=11)
    assert steps(slot) == [13, 11]
    state = states.read_states(slot.parents[1])[0]
    assert [each.losses for each in state.first.trained] == [[*STATE.trained[0].losses, 1.5]]
    saved = TorchState.parts_in(slot)
    assert saved["optimizer"]["param_groups"][0]["lr"] == 0.5
    assert torch.equal(saved["model"]["1.running_mean"], mean)
    assert torch.equal(saved["model"]["0.weight"], first.linear.weight)
    assert torch.equal(saved["average"]["weight"], torch.zeros(2, 2))
    numbers = [torch.load(slot / f"rng-0000{rank}.pt")["python"][1] for rank in range(2)]
    random.seed(1)
    assert numbers[1].tolist() == list(random.getstate()[1])
    first.last.keep(slot, after=11)
    assert not states.all_hold(slot.parent, range(2))


@pytest.mark.parametrize(
    "change",
    [
        *(Rank.step, lambda rank: rank.hold(14), lambda rank: rank.last.forget()),
        lambda rank: rank.linear.weight.detach().add_(1),
        lambda rank: rank.linear.weight.data.mul_(1.001),
        lambda rank: rank.optimizer.state[rank.linear.weight]["exp_avg"].data.add_(1),
        lambda rank: rank.optimizer.param_groups[0]["params"].append(torch.nn.Parameter(torch.ones(1))),
        lambda rank: rank.engine._parts.pop("average"),
        lambda rank: rank.model.add_module("new", torch.nn.Linear(8, 1)),
    ],
    ids=["step", "held again", "forgotten", "weight", "unversioned", "moment", "trained more", "other parts", "layer"],
)
def test_change_since_the_step_keeps_nothing(slot: Path, change: Callable[[Rank], object]) -> None:
    """An earlier state stays whole, and the supervisor waits for none."""
    _, second = ranks_of(slot)
    change(second)
    with suppress(SpecInvalid):
        second.last.keep(slot, after=11)
    assert (steps(slot), states.all_hold(slot.parent, range(2))) == ([11], False)


def test_full_memory_leaves_the_earlier_state(slot: Path) -> None:
    """A survivor that cannot write raises, and no seal says that its state is whole."""

    def fail(path: Path, state: Any) -> int:
        raise OSError("no space left")

    _, second = ranks_of(slot, fail)
    assert states.all_hold(slot.parent, range(2))
    with pytest.raises(OSError, match="no space"):
        second.last.keep(slot, after=11)
    assert (steps(slot), states.all_hold(slot.parent, range(2))) == ([11], False)


def test_short_steps_are_not_held(slot: Path) -> None:
    """Steps that take no longer than their holds are held until the cost is known. Then no file says that one is held."""
    rank = ranks_of(slot)[0]
    held = states.held_file(slot.parent, 0)
    for step in range(20, 40):
        rank.last.hold(partial(replace, STATE, step=step, files=[]), [0.0], step_s=0.0)
        assert held.exists() == (step < 24)


def test_large_part_is_not_held(slot: Path) -> None:
    """An average that takes too long to write is not held. A number of NumPy is."""
    first, second = ranks_of(slot)
    first.optimizer.param_groups[0]["lr"] = np.float64(0.25)
    first.hold()
    assert states.all_hold(slot.parent, range(2))
    first.average.register_buffer("shadow", torch.ones(1 << 20))
    for each in (first, second):
        each.hold()
    assert not states.held_file(slot.parent, 0).exists()
