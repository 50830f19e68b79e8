"""Safe loading of files that others may have written: tensors and plain values only, never code."""

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
"""The class or function that torch refuses, deep in its message."""
_WRAPPED = "WeightsUnpickler error:"
"""Prefix of torch's own explanation, after its advice."""


@contextmanager
def only_tensors(folder: Path, classes: Sequence[Any] = ()) -> Iterator[None]:
    """Let `torch.load` refuse everything but tensors, plain values and `classes` while inside, for every caller.

    Raise `CheckpointUnsafe` if a file of `folder` contains something else.
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
        """The memory."""
        return self._memory[pid]


def _refused(err: Exception) -> str:
    """Return the class that torch refuses, or else torch's explanation."""
    message = str(err).split(_WRAPPED)[-1].strip()
    named = _NAMED.search(message)
    return named[1] if named else (message.splitlines() or [type(err).__name__])[0]
