"""What a rank is given for one optimizer step: tensors, which samples are valid, and where the cursors will stand."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dlac_pipeline.plan.units import Ints


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """One rank's part of a global batch; B/W slots, of which those at the end of the last pass may be empty."""

    step: int
    """The optimizer step that this batch is for, counted from 1."""
    tensors: dict[str, torch.Tensor]
    """Column -> tensor [B/W] or [B/W, length]; zeros in empty slots."""
    valid: torch.Tensor
    """bool [B/W]: false in empty slots."""
    rows: int
    """Valid samples of the global batch, over all ranks."""
    world_size: int
    cursors: Ints
    """Where this rank's key groups stand after the batch, int64 [key groups of the rank, 3]: pass, block, position."""

    def __getitem__(self, column: str) -> torch.Tensor:
        """The tensor of one column."""
        return self.tensors[column]

    def mean(self, per_sample: torch.Tensor) -> torch.Tensor:
        """This rank's share of the global mean of `per_sample` [B/W], times the number of ranks.

        Averaging over ranks, as data-parallel engines do with gradients, then gives the mean over the valid samples of the
        global batch, whatever the number of ranks and however many slots are empty.
        """
        share = torch.where(self.valid, per_sample, torch.zeros_like(per_sample)).sum()
        return share * (self.world_size / self.rows)
