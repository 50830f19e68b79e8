"""Loading what somebody else may have written: tensors and plain values only, never code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from catalog.errors import CheckpointUnsafe

_FORCED = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


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
        first = str(err).strip().splitlines()[0]
        raise CheckpointUnsafe(
            f"expected tensors and plain values in the checkpoint {str(folder)!r}, found something else, which was not "
            f"loaded: {first}"
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
