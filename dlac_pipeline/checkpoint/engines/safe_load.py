"""Loading what somebody else may have written: tensors and plain values only, never code."""

from __future__ import annotations

import io
import os
import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import _weights_only_unpickler

from dlac_pipeline.lakehouse.errors import CheckpointUnsafe

_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_NAMED = re.compile(r"GLOBAL (\S+) (?:was not|whose)")
"""How torch names a class or function that it refuses, deep in its message."""
_WRAPPED = "WeightsUnpickler error:"
"""Behind advice, what else torch has to say."""


@contextmanager
def only_tensors(folder: Path, classes: Sequence[Any] = ()) -> Iterator[None]:
    """While inside, `torch.load` refuses everything but tensors, plain values and `classes`, whoever calls it and however.

    Raises:
        CheckpointUnsafe: a file of `folder` has something else in it.
    """
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
    """What lies in one file, in host memory; with `mmap`, tensors are read when they are used.

    Raises:
        CheckpointUnsafe: there is something else in it than tensors, plain values and `classes`.
    """
    with only_tensors(path, classes):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)


def refusal(value: Any) -> str | None:
    """What `load_tensors` would refuse of `value`, if it were saved; None: nothing. Memory of tensors is not copied."""
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
        """The memory."""
        return self._memory[pid]


def _refused(err: Exception) -> str:
    """The class that torch refuses, or else what it says of it."""
    said = str(err).split(_WRAPPED)[-1].strip()
    named = _NAMED.search(said)
    return named[1] if named else (said.splitlines() or [type(err).__name__])[0]
