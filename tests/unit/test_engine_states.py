"""States of every kind: a restored model and its optimizers train on as if they had never stopped, bit for bit."""

from collections.abc import Callable, Iterable
from pathlib import Path
from pprint import pformat
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from dlac_pipeline import TorchState
from dlac_pipeline.checkpoint.engines import Engine
from dlac_pipeline.checkpoint.stage.copies import Direct
from dlac_pipeline.extensions.exchange.foreign import foreign_checkpoint
from dlac_pipeline.extensions.sharded.distributed_state import DistributedState
from dlac_pipeline.lakehouse.errors import ResumeMismatch, ScriptInvalid, SpecInvalid

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Optimizers = Callable[["Net"], list[Optimizer]]


class Net(nn.Module):
    """Layers of many kinds. Which of them a step uses, and which are trained, changes with the step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.count: torch.Tensor
        self.first = nn.Linear(4, 4)
        self.late = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)
        if kind == "tied":
            self.late.weight = self.first.weight
        elif kind == "shared":
            self.late = self.first
        elif kind == "empty":
            self.nothing = nn.Parameter(torch.empty(0, 3))
        elif kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(0.5))
        elif kind == "complex":
            self.phase = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        elif kind == "buffers":
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("scratch", torch.zeros(2), persistent=False)
        elif kind == "bf16":
            self.to(torch.bfloat16)

    def set_trained(self, step: int) -> None:
        """Freeze or thaw a layer as a script does."""
        if self.kind == "frozen":
            self.late.requires_grad_(step < 2)
        elif self.kind == "thawed":
            self.late.requires_grad_(step > 4)

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        """Return one number per sample."""
        hidden = torch.tanh(self.first(x))
        if self.kind == "scalar":
            hidden = hidden * self.scale
        if self.kind == "complex":
            hidden = hidden * self.phase.abs()
        if self.kind == "buffers":
            self.count.add_(1)
            hidden = self.norm(hidden)
        if self.kind != "unused" and (self.kind != "used later" or step > 4):
            hidden = torch.tanh(self.late(hidden))
        out: torch.Tensor = self.head(hidden)
        return out


def one(kind: type[Optimizer], **settings: Any) -> Optimizers:
    """Return a maker of one optimizer for all parameters."""
    return lambda net: [kind(net.parameters(), **settings)]


def groups(net: Net) -> list[Optimizer]:
    """Make one optimizer of two groups, one with a tensor as learning rate."""
    rest = [each for each in net.parameters() if each is not net.head.weight]
    both = [{"params": rest, "lr": torch.tensor(0.02)}, {"params": [net.head.weight], "weight_decay": 0.0}]
    return [torch.optim.AdamW(both, lr=0.01, capturable=False, foreach=False)]


def empty_group(net: Net) -> list[Optimizer]:
    """Make an optimizer with a group without parameters, as one of biases in a model without them."""
    found: list[dict[str, Any]] = [{"params": [], "lr": 0.5}, {"params": [*net.parameters()]}]
    return [torch.optim.AdamW(found, lr=0.01)]


def two_optimizers(net: Net, layer: nn.Linear, **settings: Any) -> list[Optimizer]:
    """Make an SGD optimizer of a layer, with a state only if `settings` have momentum, and another one of all else."""
    own = [*layer.parameters()]
    rest = [each for each in net.parameters() if not any(each is other for other in own)]
    return [torch.optim.SGD(own, lr=0.01, **settings), torch.optim.Adam(rest, lr=0.01)]


class Typed(Optimizer):
    """SGD on weights in fp32, beside states of other types and empty ones."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # no loss
        """Train the weights in fp32, and round them."""
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            state = self.state[parameter]
            if not state:
                state |= {"weights": parameter.float(), "codes": torch.zeros_like(parameter, dtype=torch.uint8)}
                state |= {"parts": [torch.zeros(1), (torch.ones(1), 2)], "kind": "fp32", "nothing": {}, "none": [{}]}
            state["weights"] -= 0.01 * parameter.grad.float()
            state["codes"] += 3
            parameter.copy_(state["weights"])


OPTIMIZERS: dict[str, Optimizers] = {
    "adafactor": one(torch.optim.Adafactor),
    "adamw": one(torch.optim.AdamW, lr=0.01),
    "fused": one(torch.optim.AdamW, lr=0.01, fused=True),
    "lbfgs": one(torch.optim.LBFGS, lr=0.1, max_iter=3),
    "sgd": one(torch.optim.SGD, lr=0.01),
    "momentum": one(torch.optim.SGD, lr=0.01, momentum=0.9),
    "typed": one(Typed),
    "groups": groups,
    "empty group": empty_group,
    "several": lambda net: two_optimizers(net, net.head),
}
KINDS = ["unused", "used later", "frozen", "thawed", "tied", "shared", "empty", "scalar", "complex", "bf16", "buffers"]
CASES = [
    *((kind, "groups") for kind in KINDS),
    *((kind, "several") for kind in ("unused", "frozen", "tied")),
    *(("used later", optimizer) for optimizer in OPTIMIZERS),
    ("bf16", "typed"),
]


class Trained:
    """A net with its optimizers and its schedules."""

    def __init__(self, kind: str, make: Optimizers, seed: int) -> None:
        torch.manual_seed(seed)
        self.net = Net(kind)
        self.optimizers = make(self.net)
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in self.optimizers]

    def engine(self, name: str) -> Engine:
        """Return the adapter of all parts."""
        schedules = {f"schedule{index}": each for index, each in enumerate(self.schedules)}
        if name == "dcp":
            return DistributedState(model=self.net, optimizer=self.optimizers, **schedules)
        optimizers = {f"optimizer{index}": each for index, each in enumerate(self.optimizers)}
        return TorchState(model=self.net, **optimizers, **schedules)

    def train(self, steps: Iterable[int]) -> list[float]:
        """Train these steps. Return their losses."""
        return [self._step(step) for step in steps]

    def _step(self, step: int) -> float:
        torch.manual_seed(step)
        self.net.set_trained(step)
        x = torch.randn(8, 4).to(self.net.head.weight.dtype)

        def loss() -> torch.Tensor:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            found: torch.Tensor = (self.net(x, step).squeeze(-1) - x.sum(-1)).square().mean()
            torch.autograd.backward(found)
            return found

        found = loss()
        for optimizer, schedule in zip(self.optimizers, self.schedules, strict=True):
            optimizer.step(loss if isinstance(optimizer, torch.optim.LBFGS) else None)  # type: ignore[arg-type]
            schedule.step()
        return float(found.detach())

    def state(self) -> str:
        """Return all states as text, numbers exactly."""
        parts: list[Any] = [self.net, *self.optimizers, *self.schedules]
        states = [dict(each.state_dict()) for each in parts]
        return pformat(tree_map_only(torch.Tensor, torch.Tensor.tolist, states))  # dicts sorted


@pytest.mark.parametrize("engine", ["torch", "dcp"])
@pytest.mark.parametrize(("kind", "optimizer"), CASES)
def test_restored_state_trains_identically(tmp_path: Path, kind: str, optimizer: str, engine: str) -> None:
    """Parameters without a gradient, frozen, thawed, tied, empty and of other types, with each of torch's optimizers."""
    first, again = (Trained(kind, OPTIMIZERS[optimizer], seed=seed) for seed in (1, 2))
    first.train([1, 2, 3])
    again.net.set_trained(3)
    check_resumed(first, again, tmp_path, engine)


def check_resumed(first: Trained, again: Trained, folder: Path, engine: str) -> None:
    """Check that `again` trains three steps as `first` does, from the state that `first` has now."""
    first.engine(engine).save(folder, Direct().write)
    expected = first.train([4, 5, 6])
    again.engine(engine).load(folder, saved_world_size=1)
    assert again.train([4, 5, 6]) == expected
    assert again.state() == first.state()


def one_thawing(net: Net) -> list[Optimizer]:
    """Make an optimizer that the script gives another layer later."""
    return [torch.optim.AdamW([*net.first.parameters(), *net.head.parameters()], lr=0.01)]


def two_thawing(net: Net) -> list[Optimizer]:
    """Make two optimizers, the first of which gets another layer."""
    return [torch.optim.AdamW(net.first.parameters(), lr=0.01), torch.optim.SGD(net.head.parameters(), lr=0.01)]


@pytest.mark.parametrize("engine", ["torch", "dcp"])
@pytest.mark.parametrize("make", [one_thawing, two_thawing])
def test_added_group_is_restored(tmp_path: Path, make: Optimizers, engine: str) -> None:
    """A script that thaws a layer by a new group of its optimizer resumes as it is written: it begins without the group."""
    first, again = (Trained("unused", make, seed=seed) for seed in (1, 2))
    first.net.kind = again.net.kind = ""
    first.train([1])
    first.optimizers[0].add_param_group({"params": [*first.net.late.parameters()], "lr": 0.05})
    first.train([2, 3])
    check_resumed(first, again, tmp_path, engine)


@pytest.mark.parametrize("engine", ["torch", "dcp"])
def test_changed_type_is_converted(tmp_path: Path, engine: str) -> None:
    """A script that continues in bf16 gets the moments of fp32 in the type of its parameters, as from torch."""
    first = Trained("", OPTIMIZERS["adamw"], seed=1)
    first.train([1, 2])
    first.engine(engine).save(tmp_path, Direct().write)
    again = Trained("bf16", OPTIMIZERS["adamw"], seed=2)
    again.engine(engine).load(tmp_path, saved_world_size=1)
    again.train([3])
    assert again.optimizers[0].state[again.net.head.weight]["exp_avg"].dtype == torch.bfloat16


class Counting(nn.Linear):
    """A layer whose extra state is empty in a new model."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.counts: Any = {}

    def get_extra_state(self) -> Any:
        """Return the counts."""
        return self.counts

    def set_extra_state(self, state: Any) -> None:
        """Set the counts."""
        self.counts = state


@pytest.mark.parametrize("counts", [{"a": {"b": 1}, "none": {}}, {3: torch.ones(2).tolist()}, {}, [{}, 1], (1, 2)])
@pytest.mark.parametrize("engine", [TorchState, DistributedState])
def test_extra_state_is_restored(tmp_path: Path, counts: Any, engine: type[TorchState | DistributedState]) -> None:
    """A dict comes back with the keys that it had, and not with the new model's."""
    first, again = Counting(), Counting()
    first.counts = counts
    engine(model=first).save(tmp_path, Direct().write)
    engine(model=again).load(tmp_path, saved_world_size=1)
    assert again.counts == counts


class Versioned(nn.Linear):
    """A layer that takes a state without its version for an old one, as torchvision's `MNASNet` does."""

    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        assert metadata.get("version") == 2
        super()._load_from_state_dict(state, prefix, metadata, *rest)


@pytest.mark.parametrize("engine", [TorchState, DistributedState])
@pytest.mark.parametrize("compiled", ["", "saving", "loading", "saving, loading"])
def test_state_has_versions_of_modules(
    tmp_path: Path, compiled: str, engine: type[TorchState | DistributedState]
) -> None:
    """A wrapper changes the names in a state, and keeps the versions."""
    first, again = (nn.Sequential(Versioned(2, 2)) for _ in range(2))
    saved: Any = torch.compile(first, backend="eager") if "saving" in compiled else first
    loaded: Any = torch.compile(again, backend="eager") if "loading" in compiled else again
    engine(model=saved).save(tmp_path, Direct().write)
    engine(model=loaded).load(tmp_path, saved_world_size=1)
    assert str(again.state_dict()) == str(first.state_dict())


def test_group_of_missing_optimizer_is_refused(tmp_path: Path) -> None:
    """The parameters of an optimizer that the script makes later get no other optimizer."""
    Trained("", two_thawing, seed=1).engine("dcp").save(tmp_path, Direct().write)
    again = Trained("", lambda net: two_thawing(net)[:1], seed=1)
    with pytest.raises(ResumeMismatch, match=r"found none with \['head\.bias', 'head\.weight'\]"):
        again.engine("dcp").load(tmp_path, saved_world_size=1)


def test_adopted_optimizers_keep_their_states(tmp_path: Path) -> None:
    """Those of another program's optimizers differ in their keys, and all of them are loaded."""
    make: Optimizers = lambda net: two_optimizers(net, net.first, momentum=0.9)  # noqa: E731 - one expression
    first = Trained("", make, seed=1)
    first.train([1, 2, 3])
    weights, states = get_state_dict(first.net, first.optimizers)
    save({"model": weights, "optimizer": states}, checkpoint_id=tmp_path / "foreign", no_dist=True)
    (adopted := tmp_path / "adopted").mkdir()
    foreign_checkpoint(tmp_path / "foreign").copy(adopted, Direct().write)
    again = Trained("", make, seed=2)
    DistributedState(model=again.net, optimizer=again.optimizers).load(adopted, saved_world_size=1)
    again.schedules = first.schedules = []
    assert again.state() == first.state()


def test_parameter_of_no_model_is_refused() -> None:
    """An optimizer made before the model was sharded would never train it. States of one parameter would have one name."""
    layer = nn.Linear(4, 4)
    with pytest.raises(ScriptInvalid, match=r"Adam.*shape \(4, 4\).*after fully_shard"):
        DistributedState(model=layer, optimizer=torch.optim.Adam(nn.Linear(4, 4).parameters()))
    with pytest.raises(ScriptInvalid, match="found 'weight' in two"):
        DistributedState(model=layer, optimizer=[torch.optim.Adam(layer.parameters()) for _ in range(2)])


@pytest.mark.parametrize("place", ["state", "optimizer"])
def test_nameless_state_is_not_saved(tmp_path: Path, place: str) -> None:
    """An index has names of parameters: a number as key would come back as text, and two optimizers may share another name."""
    trained = Trained("unused", OPTIMIZERS["adamw"], seed=1)
    (optimizer,) = trained.optimizers
    expected = "found 3 in optimizer"
    if place == "state":
        optimizer.state[trained.net.head.weight] = {3: torch.ones(1)}
    else:
        optimizer.state["all"] = {"calls": 1}  # type: ignore[index]  # some optimizers do this
        expected = "AdamW, found one of 'all'"
    with pytest.raises(SpecInvalid, match=expected):
        trained.engine("dcp").save(tmp_path, Direct().write)
