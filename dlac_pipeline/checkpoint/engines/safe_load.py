"""Safe loading of files that others may have written: tensors and plain values only, and the check for it before a save."""

import io
import operator
import os
import pickle
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import _weights_only_unpickler

from dlac_pipeline.lakehouse.errors import CheckpointUnsafe, SpecInvalid

_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_NAMED = re.compile(r"GLOBAL (\S+) (?:was not|whose)")
"""The class or function that torch refuses, deep in its message."""
_WRAPPED = "WeightsUnpickler error:"
"""Prefix of torch's own explanation, after its advice."""
_LOADED = frozenset({bool, float, complex, str, bytes, type(None)})
_LONGEST_INT_BITS = 1024
"""Loading refuses much longer ones."""
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_SPANS = (np.datetime64, np.timedelta64)
"""Scalars of NumPy whose unit Python's numbers would lose."""

Place = tuple[Any, ...]
"""The keys and indices that lead to a value."""


@contextmanager
def only_tensors(folder: Path, classes: Sequence[Any] = ()) -> Iterator[None]:
    """Make every `torch.load` inside raise `CheckpointUnsafe` if a file has more than tensors, plain values and `classes`."""
    before = os.environ.get(_FORCED)
    os.environ[_FORCED] = "1"  # also where a library asks for weights_only=False
    try:
        with torch.serialization.safe_globals(list(classes)):
            yield
    except pickle.UnpicklingError as err:
        raise CheckpointUnsafe(
            f"expected tensors and plain values in the checkpoint {str(folder)!r}, found something else, which was not "
            f"loaded: {_refused(err)}"
        ) from err
    finally:
        if before is None:
            del os.environ[_FORCED]
        else:
            os.environ[_FORCED] = before


def load_tensors(path: Path, classes: Sequence[Any] = (), *, mmap: bool = False) -> Any:
    """Load one file into host memory as in `only_tensors`. With `mmap`, tensors are read when they are used."""
    with only_tensors(path, classes):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def refusal(value: Any) -> str | None:
    """Return what `load_tensors` would refuse of `value` if it were saved, or None. Memory of tensors is not copied."""
    memory: list[Any] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, memory).dump(value)
        stream.seek(0)
        _Unpickler(stream, memory).load()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    except Exception as err:  # pickling and building run methods of the value's own
        return _refused(err)
    return None


class _Pickler(pickle.Pickler):
    """Writes as `torch.save` does, but of tensors' memory only where in a list it is."""

    def __init__(self, stream: io.BytesIO, memory: list[Any]) -> None:
        super().__init__(stream, protocol=torch.serialization.DEFAULT_PROTOCOL)
        self._memory = memory

    def persistent_id(self, value: Any) -> int | None:
        """Its place in the list, if it is the memory of a tensor."""
        if not (isinstance(value, torch.storage.TypedStorage) or torch.is_storage(value)):
            return None
        self._memory.append(value)
        return len(self._memory) - 1


class _Unpickler(_weights_only_unpickler.Unpickler):
    """Reads as `torch.load` does, tensors in the memory that they had."""

    def __init__(self, stream: io.BytesIO, memory: list[Any]) -> None:
        super().__init__(stream)
        self._memory = memory

    def persistent_load(self, pid: int) -> Any:
        return self._memory[pid]


def _refused(err: Exception) -> str:
    """Return the class that torch refuses, or else torch's explanation."""
    message = str(err).split(_WRAPPED)[-1].strip()
    named = _NAMED.search(message)
    return named[1] if named else (message.splitlines() or [type(err).__name__])[0]


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
