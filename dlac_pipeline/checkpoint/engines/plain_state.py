"""Plain state: a check, before a checkpoint is written, that it contains nothing that loading refuses."""

import operator
from collections import OrderedDict
from typing import Any

import numpy as np
import torch

from dlac_pipeline.checkpoint.engines.safe_load import refusal
from dlac_pipeline.lakehouse.errors import SpecInvalid

_LOADED = frozenset({bool, float, complex, str, bytes, type(None)})
_LONGEST_INT_BITS = 1024
"""Loading refuses much longer ones."""
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SPANS = (np.datetime64, np.timedelta64)
"""Scalars of NumPy whose unit Python's numbers would lose."""

Place = tuple[Any, ...]
"""The keys and indices that lead to a value."""


def plain_state(state: Any, *, at: str | None = None) -> Any:
    """Return `state` as it can be loaded: itself, unless it contains NumPy scalars. The script's objects are never changed.

    Raise `SpecInvalid` with the place, in what `at` names, of something that loading would refuse.
    """
    try:
        return _plain(state, () if at is None else (at,))
    except RecursionError as err:
        raise SpecInvalid(
            "expected a state of a few levels to save in a checkpoint, found one that is too deep, or contains itself: "
            "let state_dict() give plain values"
        ) from err


def _plain(value: Any, place: Place) -> Any:
    if _is_loaded(value):
        return value
    kind = type(value)
    if kind in (dict, OrderedDict):
        return _plain_dict(value, place)
    if kind in (list, tuple):
        plain = [_inside(each, place, index) for index, each in enumerate(value)]
        return value if all(map(operator.is_, value, plain)) else kind(plain)
    if isinstance(value, np.number | np.bool_ | np.character) and not isinstance(value, _SPANS):
        number = value.item()
        if _is_loaded(number):  # Python has nothing as long as a longdouble
            return number
    refused = refusal(value)
    if refused is None:
        return value
    # as Python would write it, such as optimizer['param_groups'][0]['lr']
    where = str(place[0]) + "".join(f"[{key!r}]" for key in place[1:]) if place else "its top"
    raise SpecInvalid(
        f"expected tensors, numbers, strings, None, and lists, tuples and dicts of them to save in a checkpoint, found "
        f"{kind.__module__}.{kind.__qualname__} at {where}, which could not be loaded again ({refused} is refused): keep it "
        "as one of these, an array as torch.from_numpy(...); nothing was committed"
    )


def _plain_dict(value: dict[Any, Any], place: Place) -> dict[Any, Any]:
    plain = {_inside(key, place, key): _inside(each, place, key) for key, each in value.items()}
    own = getattr(value, "__dict__", {})  # attributes of a module's state_dict
    beside = _plain_dict(own, place) if own else own
    same_items = all(map(operator.is_, (*value, *value.values()), (*plain, *plain.values())))
    if beside is own and same_items:
        return value
    copied = type(value)(plain)
    if beside:
        vars(copied).update(beside)
    return copied


def _inside(value: Any, place: Place, key: Any) -> Any:
    return value if _is_loaded(value) else _plain(value, (*place, key))


def _is_loaded(value: Any) -> bool:
    """Return True if a quick look proves that loading accepts it."""
    kind = type(value)
    if kind is int:
        return bool(value.bit_length() <= _LONGEST_INT_BITS)
    return kind in _LOADED or (kind in _TENSORS and not value.__dict__)
