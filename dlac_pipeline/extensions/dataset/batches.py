"""A batch as a plain dict, for what walks through dicts: pinning, collators, moves between devices."""

from typing import Any, Literal, get_args

import torch

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.device import DeviceCopies

ABOUT = "dlac"
"""The key of a batch's own facts."""

DictBatch = dict[str, Any]
LastBatch = Literal["partial", "drop", "pad"]
"""The form of a batch with fewer samples than slots: only its samples, not delivered, or filled up with zero rows."""
LAST_BATCHES: tuple[str, ...] = get_args(LastBatch)


def as_batch(batch: DictBatch) -> Batch:
    """Return the `Batch` of a dict that a dataset gave, for its `mean` and `token_mean`, without its advances."""
    about = batch[ABOUT]
    named = {name: about[name] for name in ("step", "valid", "source", "rows", "tokens", "readers")}
    tensors = {name: tensor for name, tensor in batch.items() if name != ABOUT}
    return Batch(tensors=tensors, cursors=about["cursors"].cpu().numpy(), **named)


def as_dict(batch: Batch) -> DictBatch:
    """Return a batch as a dict: tensors by column, and facts of the batch. Raises `SpecInvalid` if a column has their key."""
    if ABOUT in batch.tensors:
        raise SpecInvalid(f"expected columns of other names than {ABOUT!r}, found it: let a transform rename it")
    names = ("step", "valid", "source", "rows", "tokens", "readers")
    about = {name: getattr(batch, name) for name in names}
    return {**batch.tensors, ABOUT: {**about, "cursors": torch.from_numpy(batch.cursors)}}


def copy_batch(batch: DictBatch, copies: DeviceCopies) -> DictBatch:
    """Return a batch with its tensors where `copies` brings them. Its cursors stay in host memory, where states are made."""
    if not copies.acts:
        return batch
    moved: DictBatch = copies.copy({**batch, ABOUT: {**batch[ABOUT], "cursors": None}})
    return {**moved, ABOUT: {**moved[ABOUT], "cursors": batch[ABOUT]["cursors"]}}


def make_empty(batch: DictBatch, *, padded: bool) -> DictBatch:
    """Make the batch after a rank's last one: without samples, or with as many slots as before if `padded`."""
    about = batch[ABOUT]
    slots = len(about["valid"]) if padded else 0
    empty = {
        "step": about["step"] + 1,
        "valid": torch.zeros_like(about["valid"][:slots]),
        "source": torch.full_like(about["source"][:slots], -1),
        "rows": 0,
        "tokens": 0,
    }
    tensors = {name: torch.zeros_like(tensor[:slots]) for name, tensor in batch.items() if name != ABOUT}
    return {**tensors, ABOUT: {**about, **empty}}
