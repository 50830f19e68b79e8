"""A reader's batch for one optimizer step: tensors, the valid samples, and the cursors after it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from dlac_pipeline.lakehouse.errors import ScriptInvalid
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.device import Device, DeviceCopies
from dlac_pipeline.read.line import BlockAdvance

Moved = tuple[int, int, BlockAdvance]


def _nothing(*losses: torch.Tensor) -> None:
    """Do nothing, for a caller that does not ask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Share of a reader in a global batch: B/R slots. At the end of the last pass the last ones may be empty.

    Where the R readers do not divide B, B/R is rounded up or down. In host memory, or on the requested device.
    """

    step: int
    """The optimizer step that this batch is for, counted from 1."""
    tensors: dict[str, torch.Tensor]
    """Column -> tensor [B/R] or [B/R, length], zeros in empty slots. Packed: tokens, document and position, each [B/R, T]."""
    valid: torch.Tensor
    """bool [B/R]: false in empty slots."""
    source: torch.Tensor
    """int64 [B/R]: the number of the source of each sample, -1 in empty slots."""
    rows: int
    """Valid samples of the global batch, over all readers."""
    tokens: int
    """Tokens of the global batch, over all readers, without padding. Without packing, the samples."""
    readers: int
    """Number of readers that share the global batch. Processes of one reader have the same batch."""
    cursors: Ints
    """The cursors of this reader's key groups after the batch, int64 [key groups, sources, 4]: pass, block, position, offset."""
    moved: tuple[Moved, ...] = ()
    """The ranges that the batch moved, where the step does not determine them."""
    micro_batches: int = 1
    """Number of micro-batches of this batch, this one included. Their gradients are averaged."""
    on_mean: Callable[[torch.Tensor], None] = field(default=_nothing, repr=False)
    """Receives the losses of samples or tokens when their mean is requested: the forward part of the step is done."""
    on_weight: Callable[[], None] = field(default=_nothing, repr=False)
    """Called when the weight or a mean is requested."""

    def __getitem__(self, column: str) -> torch.Tensor:
        """The tensor of one column. Raise `ScriptInvalid` for a batch without values: of a stage in the middle of a pipeline.

        Raise `KeyError` for another name, with those of the batch.
        """
        if not self.tensors:
            raise ScriptInvalid(
                f"expected values of {column!r}, found none, because this rank has a stage in the middle of the "
                'pipeline: use batches at the first and the last stage only, or set read.stages = "all"'
            )
        if column not in self.tensors:
            raise KeyError(f"expected one of {[*self.tensors]!r}, found {column!r}")
        return self.tensors[column]

    def copy_with(self, copies: DeviceCopies) -> "Batch":
        """Return the batch with its tensors, `valid` and `source` where `copies` brings them."""
        if not copies.acts:
            return self
        tensors, valid, source = copies.copy((self.tensors, self.valid, self.source))
        return replace(self, tensors=tensors, valid=valid, source=source)

    @property
    def weight(self) -> float:
        """Factor that makes a mean over the valid samples of this batch the share that `mean` returns.

        It is 1 if every slot of the global batch is valid, and 0 if this batch has no valid sample.
        """
        self.on_weight()
        return int(self.valid.sum()) * self.readers * self.micro_batches / self.rows

    def mean(self, per_sample: torch.Tensor) -> torch.Tensor:
        """Return this reader's share of the global mean of `per_sample` [B/R], times the number of readers, on the same device.

        Averaging over readers, as data-parallel engines do with gradients, then gives the mean over the valid samples of the
        global batch, for any number of readers and of empty slots. Each reader may have equally many processes. Of a
        micro-batch, the average over the micro-batches does.
        """
        return self._share(per_sample, counted=self.valid, of=self.rows)

    def token_mean(self, per_token: torch.Tensor) -> torch.Tensor:
        """Return the mean of `per_token` [B/R, T] over the tokens of a packed global batch. Padding does not count."""
        return self._share(per_token, counted=self["document"] > 0, of=self.tokens)

    def _share(self, losses: torch.Tensor, *, counted: torch.Tensor, of: int) -> torch.Tensor:
        self.on_mean(losses)
        self.on_weight()
        mask = counted.to(losses.device, non_blocking=counted.is_pinned())
        share = torch.where(mask, losses, torch.zeros_like(losses)).sum()
        return share * (self.readers * self.micro_batches / of)


def drop_empty_slots(batch: Batch) -> Batch:
    """Return the batch with its samples only."""
    kept = batch.valid
    if bool(kept.all()):
        return batch
    ragged = _ragged_columns(batch)
    tensors = dict(batch.tensors)
    for name in batch.tensors.keys() - ragged:
        tensor = batch.tensors[name]
        # the row of an empty slot has no values
        is_offsets = name.removesuffix(".offsets") in ragged
        tensors[name] = torch.cat([tensor[:1], tensor[1:][kept]]) if is_offsets else tensor[kept]
    return replace(batch, tensors=tensors, valid=kept[kept], source=batch.source[kept])


def take_slots(batch: Batch, low: int, high: int) -> Batch:
    """Return the batch with the slots from `low` to before `high` only, as views."""
    if (low, high) == (0, len(batch.valid)):
        return batch
    ragged = _ragged_columns(batch)
    tensors = {name: tensor[low:high] for name, tensor in batch.tensors.items() if name not in ragged}
    for name in ragged:
        offsets = batch.tensors[f"{name}.offsets"][low : high + 1]
        first, last = offsets[[0, -1]].tolist()
        tensors |= {name: batch.tensors[name][first:last], f"{name}.offsets": offsets - first}
    return replace(batch, tensors=tensors, valid=batch.valid[low:high], source=batch.source[low:high])


def place_losses(batch: Batch, slots: torch.Tensor) -> Callable[[torch.Tensor], None]:
    """Return the `on_mean` of a micro-batch: `batch.on_mean` receives its losses in their slots, and zeros elsewhere."""

    def place(losses: torch.Tensor) -> None:
        if losses.dim():
            whole = losses.new_zeros(len(batch.valid), *losses.shape[1:])
            whole[slots.to(losses.device)] = losses[: len(slots)]
            batch.on_mean(whole)

    return _nothing if batch.on_mean is _nothing else place


def _ragged_columns(batch: Batch) -> set[str]:
    """Return the columns of flat values, whose offsets are another tensor with one more number than there are slots."""
    found = {name.removesuffix(".offsets") for name, each in batch.tensors.items() if len(each) > len(batch.valid)}
    return {name for name in found if f"{name}.offsets" in batch.tensors}


def copier_to(device: Device | None, *, pin_memory: bool | None) -> Callable[[Batch], Batch]:
    """Return the function that copies batches to a device. Raises `SpecInvalid` if the device is not on this node."""
    return partial(Batch.copy_with, copies=DeviceCopies(device, pin_memory=pin_memory))
