"""Plain values in a checkpoint: numbers become Python's, and types that loading refuses are never saved."""

from __future__ import annotations

import copy
import struct
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, plain_state, refusal
from dlac_pipeline.checkpoint.stage.streamed_file import write_state
from dlac_pipeline.lakehouse.errors import CheckpointUnsafe, SpecInvalid


class Pair(NamedTuple):
    """Two numbers."""

    first: int
    second: int


class Kind(IntEnum):
    """A number with a name."""

    WARM = 1


class Strange:
    """An object of a script."""


def save_and_load(state: Any, folder: Path) -> Any:
    """Save a state, and return the loaded one."""
    write_state(state, folder / "state.pt")
    return load_tensors(folder / "state.pt")


NUMBERS: list[Any] = [
    np.float64(0.1),
    np.float64("nan"),
    np.float64("-0.0"),
    np.float32(0.1),
    np.float16(0.1),
    np.int64(-(2**63)),
    np.uint64(2**64 - 1),
    np.uint8(7),
    np.bool_(True),
    np.complex128(1 + 2j),
    np.str_("warm"),
    np.bytes_(b"\xff"),
]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_numpy_number_becomes_python_number(tmp_path: Path, number: Any) -> None:
    """The value stays bit for bit, anywhere in the state and also as a key. Loading would have refused the NumPy type."""
    state: dict[Any, Any] = {"groups": [{"lr": number}, (1, number)], number: "as a key"}
    (tmp_path / "as it is").mkdir()
    with pytest.raises(CheckpointUnsafe):
        save_and_load(state, tmp_path / "as it is")
    found = save_and_load(plain_state(state), tmp_path)
    for one in (found["groups"][0]["lr"], found["groups"][1][1], list(found)[1]):
        assert type(one) in (bool, int, float, complex, str, bytes)
        if isinstance(one, float):
            assert struct.pack("d", one) == struct.pack("d", float(number))
        else:
            assert one == number
    assert type(number) is type(state["groups"][0]["lr"])  # the script's own state is unchanged


def test_plain_state_is_unchanged() -> None:
    """No container is copied, and no tensor is read."""
    model = torch.nn.BatchNorm1d(2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rest": [None, (1, "a"), b"b", 2**70]}
    assert plain_state(state) is state


def test_only_containers_of_numbers_are_copied() -> None:
    """Tensors, and containers without such a number, are shared with the state. The state is unchanged."""
    weight, betas = torch.ones(2), (0.9, 0.99)
    live: OrderedDict[str, Any] = OrderedDict(
        weight=weight, group={"betas": betas, "lr": np.float64(0.5)}, other={"a": [1]}
    )
    vars(live)["_metadata"] = {"": {"version": np.int64(2)}}
    before = copy.copy(live)
    made = plain_state(live)
    assert isinstance(made, OrderedDict)
    assert list(made) == list(live)
    assert made["weight"] is weight
    assert made["group"]["betas"] is betas
    assert made["other"] is live["other"]
    assert type(made["group"]["lr"]) is float
    assert type(vars(made)["_metadata"][""]["version"]) is int
    assert live == before
    assert type(live["group"]["lr"]) is np.float64
    assert type(vars(live)["_metadata"][""]["version"]) is np.int64


REFUSED: list[tuple[Any, str, str]] = [
    (np.zeros(2), r"numpy\.ndarray", "_reconstruct"),
    (np.longdouble(1), r"numpy\.longdouble", "scalar"),
    (np.timedelta64(1, "s"), r"numpy\.timedelta64", "scalar"),
    (defaultdict(int, a=1), r"collections\.defaultdict", r"collections\.defaultdict"),
    (Pair(1, 2), r".*\.Pair", r"\.Pair"),
    (Kind.WARM, r".*\.Kind", r"\.Kind"),
    (Strange(), r".*\.Strange", r"\.Strange"),
    (Fraction(1, 3), r"fractions\.Fraction", r"fractions\.Fraction"),
    (Counter({np.int64(3): 1}), r"collections\.Counter", "scalar"),
    (lambda step: step, r"builtins\.function", "pickle"),
    ((each for each in "abc"), r"builtins\.generator", "pickle"),
    (2**9000, r"builtins\.int", "operand"),
]


@pytest.mark.parametrize(("value", "kind", "why"), REFUSED, ids=[kind for _, kind, _ in REFUSED])
def test_unloadable_value_is_located(value: Any, kind: str, why: str) -> None:
    """The error comes before a write, and names the type, the path and the remedy."""
    state = {"optimizer": {"param_groups": [{"lr": 0.1}, {"lr": value}]}}
    message = rf"found {kind} at optimizer\['param_groups'\]\[1\]\['lr'\], which .*{why}.*keep it as one of these"
    with pytest.raises(SpecInvalid, match=message):
        plain_state(state)
    with pytest.raises(SpecInvalid, match=r"at optimizer\.state\.weight\['x'\]"):
        plain_state({"x": value}, at="optimizer.state.weight")


def test_recursive_state_is_refused() -> None:
    """Such a state is not followed endlessly."""
    state: dict[str, Any] = {"a": 1}
    state["self"] = [state]
    with pytest.raises(SpecInvalid, match="contains itself"):
        plain_state(state)


class Flagged(torch.Tensor):
    """A tensor with a class of a script."""


def exotic() -> list[Any]:
    """Return rare values that loading accepts."""
    marked = torch.nn.Parameter(torch.ones(2))
    marked.frozen_at = 3  # type: ignore[attr-defined]  # as scripts do
    values = [torch.float16, torch.Size([2, 3]), torch.device("cpu"), {1, 2}, bytearray(b"x"), Counter("aab")]
    return [*values, marked, torch.ones(2, 2).to_sparse()]


@pytest.mark.parametrize("value", exotic(), ids=lambda value: type(value).__name__)
def test_loadable_value_is_saved(tmp_path: Path, value: Any) -> None:
    """The same object is saved, however rare its type, and is loaded again."""
    state = {"a": value}
    assert plain_state(state)["a"] is value
    assert str(save_and_load(state, tmp_path)["a"]) == str(value)


def test_allowed_classes_are_saved(tmp_path: Path) -> None:
    """Classes that torch allows are allowed. A tensor of such a class is checked without a copy of its memory."""
    flagged = torch.ones(1000).as_subclass(Flagged)
    assert refusal(flagged) == f"{Flagged.__module__}.Flagged"
    with torch.serialization.safe_globals([Flagged, Pair]):
        state = plain_state({"a": flagged, "pair": Pair(1, 2)})
        found = save_and_load(state, tmp_path)
    assert state["a"] is flagged
    assert torch.equal(found["a"], flagged)
    assert found["pair"] == Pair(1, 2)


@pytest.mark.parametrize(
    ("value", "class_name"),
    [
        (np.float64(0.1), r"scalar$"),
        (defaultdict(int), r": collections\.defaultdict$"),
        (Strange(), r"\.Strange$"),
        (print, r": print$"),
    ],
)
def test_refused_file_names_class(tmp_path: Path, value: Any, class_name: str) -> None:
    """The error has the class that torch named at the end of its advice, and not the advice."""
    with pytest.raises(CheckpointUnsafe, match=class_name):
        save_and_load({"a": value}, tmp_path)
