"""Copies beside training: a step of an optimizer waits for the copies of its tensors, and all else is copied at once."""

import copy
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._pytree import tree_leaves

from dlac_pipeline.checkpoint import step_gate
from dlac_pipeline.checkpoint.engines import TorchState
from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, in_thread
from dlac_pipeline.checkpoint.step_gate import StepGate
from dlac_pipeline.lakehouse.errors import StateChanged

DELAY_S = 0.02
KINDS = ("foreach", "fused", "lbfgs", "gan", "tied", "frozen", "replaced", "accumulates", "skips")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy small tensors beside training, too."""
    monkeypatch.setattr(step_gate, "_LEAST_BYTES", 1)


class Script:
    """A script in small: two layers, an optimizer, and what `kind` adds to them."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        self.kind = kind
        self.first, middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.model = nn.Sequential(self.first, nn.BatchNorm1d(6), middle, self.last)
        if kind == "tied":
            self.last.weight = middle.weight
        trained = [*self.model[:3].parameters()]
        options: dict[str, Any] = {"fused": True} if kind == "fused" else {"foreach": True}
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=0.01, **options)
        if kind == "lbfgs":
            self.optimizer = torch.optim.LBFGS(trained, max_iter=3)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]
        self.parts: dict[str, Any] = {
            "model": self.model,
            "optimizer": self.optimizer,
            "average": self.average,
            "schedule": self.schedule,
        }
        if kind == "gan":
            self.critic = nn.Linear(6, 1)
            self.other = torch.optim.SGD(self.critic.parameters(), lr=0.1, momentum=0.9)
            self.parts |= {"critic": self.critic, "other": self.other}

    def step(self, number: int) -> float:
        """Do a step, and the work after it."""
        if self.kind == "frozen":  # no optimizer has the last layer
            self.last.weight.data.mul_(0.9)
        if self.kind == "replaced":
            self.first.weight.data = self.first.weight.data * 0.9
        if self.kind == "accumulates":
            self.loss(number + 100)
        loss = self.loss(number)
        if self.kind == "gan" and number % 2:
            self.other.step()
            self.other.zero_grad()
        clip_grad_norm_(self.model.parameters(), 0.5)
        if self.kind != "skips" or number not in (2, 4):
            self.optimizer.step(partial(self.loss, number, only=True) if self.kind == "lbfgs" else None)  # type: ignore[arg-type]
        self.optimizer.zero_grad()
        self.schedule.step()
        self.average.update_parameters(self.model)
        return loss.item()

    def loss(self, number: int, *, only: bool = False) -> torch.Tensor:
        """Return the loss of a batch, and add its gradients, or replace all by them."""
        if only:
            self.optimizer.zero_grad()
        out = self.model(torch.sin(torch.arange(24.0).reshape(4, 6) + number))
        loss: torch.Tensor = ((self.critic(out) if self.kind == "gan" else out) ** 2).mean()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss


def begin_copy(gate: StepGate, engine: TorchState, found: dict[str, Any], *, streams: bool) -> Future[Any]:
    """Begin to copy the state of an engine slowly, and return the end to come."""

    def save(state: Any, path: Path) -> None:
        time.sleep(DELAY_S)
        found[path.name] = copy.deepcopy(state)

    def finish() -> None:
        time.sleep(DELAY_S)
        copies.finish()

    copies = Copies(CopyMemory(), save, stable=gate.stable(), streams=streams)
    engine.save(Path(), copies.write)
    copies.handed_over()
    copied = in_thread(finish, "copy")
    gate.hold(copies.wait)
    return copied


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_of_its_step(kind: str, streams: bool) -> None:
    """A state has what it had at the request for the next batch, though it is read later, and losses are the same to the bit."""
    script, other = Script(kind), Script(kind)
    engine = TorchState(**script.parts)
    gate, losses, beside = StepGate(engine), [script.step(0)], 0
    undisturbed = [other.step(number) for number in range(6)]
    for number in range(1, 6):
        gate.finish()
        engine.save(Path(), write := Mock())
        expected, found = (
            {path.name: copy.deepcopy(state) for (path, state), _ in write.call_args_list},
            dict[str, Any](),
        )
        copied = begin_copy(gate, engine, found, streams=streams)
        beside += bool(gate.stable())
        losses.append(script.step(number))
        copied.result()
        pairs = zip(tree_leaves(found), tree_leaves(expected), strict=True)
        assert all(torch.equal(each, was) if isinstance(was, torch.Tensor) else each == was for each, was in pairs)
    assert losses == undisturbed
    assert beside == 4


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("written", [torch.Tensor.detach, lambda weight: weight.data], ids=["in place", "unversioned"])
def test_changed_state_is_refused(written: Callable[[torch.Tensor], torch.Tensor], streams: bool, late: bool) -> None:
    """Weights that a script changes before they are copied are named. Once a change is known, they are copied at once."""
    script = Script("foreach")
    engine = TorchState(**script.parts)
    gate = StepGate(engine)
    script.step(0)
    assert not gate.stable()
    script.step(1)
    copied = begin_copy(gate, engine, {}, streams=streams)
    if late:
        copied.result()
    written(script.first.weight).mul_(0.5)
    script.step(2)
    with nullcontext() if late else pytest.raises(StateChanged, match=r"'model\.0\.weight'"):
        copied.result()
    assert bool(gate.stable()) == (late and written is not torch.Tensor.detach), (
        "a change that is found makes later copies at once"
    )
    again = StepGate(engine)
    assert not again.stable()
    again.finish()
    assert again.is_sure is None, "no optimizer has made a step"
    assert not again.stable()
    written(script.first.weight).mul_(0.5)
    script.step(3)
    assert not again.stable()


@pytest.mark.parametrize("hooks", [{}, OrderedDict[int, Any]()], ids=["plain", "uncalled"])
def test_uncalled_hooks_make_nothing_stable(hooks: Any) -> None:
    """A wrapper may skip the constructor of PyTorch. Then its step calls no hook."""
    wrapper: Any = object.__new__(torch.optim.Optimizer)
    wrapper.param_groups, wrapper.state = [{"params": [torch.ones(64)]}], {}
    wrapper._optimizer_step_pre_hooks = hooks
    for optimizers in ([wrapper], lambda: [wrapper]):
        gate = StepGate(SimpleNamespace(optimizers=optimizers))
        gate.stable()
        gate.finish(in_step=True)
        assert not gate.stable()


def test_steps_of_all_threads_wait() -> None:
    """A step in a second thread waits for a copy that the first one waits for."""
    gate, copied = StepGate(), threading.Event()
    gate.hold(lambda: not copied.wait())
    steps = [in_thread(gate.finish, "step") for _ in range(2)]
    time.sleep(DELAY_S)
    assert not any(each.done() for each in steps)
    copied.set()
    assert [each.result() for each in steps] == [None, None]
