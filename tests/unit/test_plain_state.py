"""Plain values in a checkpoint: numbers become Python's, and types that loading refuses are never saved."""

import struct
from collections import Counter, OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from dlac_pipeline.checkpoint.engines.safe_load import load_tensors, plain_state
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


NUMBERS: list[Any] = [np.float64(0.1), np.float64("nan"), np.bool_(True), np.bytes_(b"\xff")]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: type(number).__name__)
def test_numpy_number_becomes_python_number(tmp_path: Path, number: Any) -> None:
    """The value stays bit for bit, anywhere in the state and also as a key. Loading would have refused the NumPy type."""
    state: dict[Any, Any] = {"groups": [{"lr": number}, (1, number)], number: "as a key"}
    (tmp_path / "as it is").mkdir()
    with pytest.raises(CheckpointUnsafe):
        save_and_load(state, tmp_path / "as it is")
    found = save_and_load(plain_state(state), tmp_path)
    weights: OrderedDict[str, Any] = OrderedDict(weight=torch.ones(2))
    vars(weights)["_metadata"] = {"": {"version": number}}
    made = plain_state({"model": weights})["model"]
    assert made["weight"] is weights["weight"]
    assert type(vars(made)["_metadata"][""]["version"]) is not type(number)
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


REFUSED: list[tuple[Any, str, str]] = [
    (np.zeros(2), r"numpy\.ndarray", "_reconstruct"),
    (Pair(1, 2), r".*\.Pair", r"\.Pair"),
    (Kind.WARM, r".*\.Kind", r"\.Kind"),
    (Strange(), r".*\.Strange", r"\.Strange"),
    (lambda step: step, r"builtins\.function", "pickle"),
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
