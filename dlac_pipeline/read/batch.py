"""What a rank is given for one optimizer step: tensors, which samples are valid, and where the cursors will stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import torch

from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.device import Device, DeviceCopies
from dlac_pipeline.read.line import BlockAdvance

Moved = tuple[int, int, BlockAdvance]
"""(source, key group, what a batch moved)."""


def _nothing() -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch; B/W slots, of which those at the end of the last pass may be empty.

    In host memory, or on the device that was asked for.
    """

    step: int
    """The optimizer step that this batch is for, counted from 1."""
    tensors: dict[str, torch.Tensor]
    """Column -> tensor [B/W] or [B/W, length]; zeros in empty slots. Packed: tokens, document and position, each [B/W, T]."""
    valid: torch.Tensor
    """bool [B/W]: false in empty slots."""
    source: torch.Tensor
    """int64 [B/W]: the number of the source of each sample; -1 in empty slots."""
    rows: int
    """Valid samples of the global batch, over all ranks."""
    tokens: int
    """Tokens of the global batch, over all ranks, padding left out; where nothing is packed, the samples."""
    world_size: int
    cursors: Ints
    """Where this rank's key groups stand after the batch, int64 [key groups, sources, 4]: pass, block, position, offset."""
    moved: tuple[Moved, ...] = ()
    """What the batch moved, where the steps alone do not say it."""
    on_mean: Callable[[], None] = field(default=_nothing, repr=False)
    """Called when the loss is asked for: the forward part of the step is done."""

    def __getitem__(self, column: str) -> torch.Tensor:
        """The tensor of one column."""
        return self.tensors[column]

    def copy_with(self, copies: DeviceCopies) -> Batch:
        """Return the batch with its tensors, `valid` and `source` where `copies` brings them."""
        if not copies.acts:
            return self
        tensors, valid, source = copies.copy((self.tensors, self.valid, self.source))
        return replace(self, tensors=tensors, valid=valid, source=source)

    def mean(self, per_sample: torch.Tensor) -> torch.Tensor:
        """This rank's share of the global mean of `per_sample` [B/W], times the number of ranks; on the same device.

        Averaging over ranks, as data-parallel engines do with gradients, then gives the mean over the valid samples of the
        global batch, whatever the number of ranks and however many slots are empty.
        """
        return self._share(per_sample, counted=self.valid, of=self.rows)

    def token_mean(self, per_token: torch.Tensor) -> torch.Tensor:
        """As `mean`, of `per_token` [B/W, T] over the tokens of a packed global batch; padding does not count."""
        return self._share(per_token, counted=self.tensors["document"] > 0, of=self.tokens)

    def _share(self, losses: torch.Tensor, *, counted: torch.Tensor, of: int) -> torch.Tensor:
        self.on_mean()
        there = counted.to(losses.device, non_blocking=counted.is_pinned())
        share = torch.where(there, losses, torch.zeros_like(losses)).sum()
        return share * (self.world_size / of)


def copy_batches(batches: Iterable[Batch], *, device: Device | None, pin_memory: bool | None) -> Iterator[Batch]:
    """Yield the batches with their tensors on a device, or in page-locked memory, as `DeviceCopies` says.

    Raises:
        SpecInvalid: the device is not on this machine.
    """
    copies = DeviceCopies(device, pin_memory=pin_memory)
    for batch in batches:
        yield batch.copy_with(copies)
