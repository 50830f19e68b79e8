"""A batch as a plain dict, for what walks through dicts: pinning, collators, moves between devices."""

from __future__ import annotations

from typing import Any

import torch

from catalog.errors import SpecInvalid
from dlac_pipeline.read.batch import Batch

ABOUT = "dlac"
"""The key under which a batch says what it is."""

DictBatch = dict[str, Any]


def as_batch(batch: DictBatch) -> Batch:
    """The `Batch` of a dict that a dataset gave, for its `mean` and `token_mean`; what it moved is not kept."""
    about = batch[ABOUT]
    named = {name: about[name] for name in ("step", "valid", "source", "rows", "tokens", "world_size")}
    tensors = {name: tensor for name, tensor in batch.items() if name != ABOUT}
    return Batch(tensors=tensors, cursors=about["cursors"].cpu().numpy(), **named)


def as_dict(batch: Batch) -> DictBatch:
    """A batch as a dict: its tensors by column, and what else there is to say of it.

    Raises:
        SpecInvalid: a column has the name that says it.
    """
    if ABOUT in batch.tensors:
        raise SpecInvalid(f"expected columns of other names than {ABOUT!r}, found it: let a transform rename it")
    names = ("step", "valid", "source", "rows", "tokens", "world_size")
    about = {name: getattr(batch, name) for name in names}
    return {**batch.tensors, ABOUT: {**about, "cursors": torch.from_numpy(batch.cursors)}}


def emptied(batch: DictBatch) -> DictBatch:
    """The batch behind the last one of a rank: as the last, with nothing in it."""
    about = batch[ABOUT]
    empty = {
        "step": about["step"] + 1,
        "valid": torch.zeros_like(about["valid"]),
        "source": torch.full_like(about["source"], -1),
        "rows": 0,
        "tokens": 0,
    }
    tensors = {name: torch.zeros_like(tensor) for name, tensor in batch.items() if name != ABOUT}
    return {**tensors, ABOUT: {**about, **empty}}
