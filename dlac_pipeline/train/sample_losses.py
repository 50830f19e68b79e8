"""Losses of single samples, as the script passes them to `Batch.mean` and `Batch.token_mean`."""

import numpy as np
import torch

from dlac_pipeline.read.batch import Batch

Parts = list[tuple[float, int]]
"""Loss and items of a sample, or of each of its documents in their order. Empty for an empty slot."""


class SampleLosses:
    """The losses of this rank's samples in one step. Their tensors stay on their device, without their graph, until `read`."""

    def __init__(self, batch: Batch) -> None:
        self.step = batch.step
        # The other tensors of the batch may be large, and share their memory with those of other steps.
        self._valid, self._document = batch.valid.clone(), batch.tensors.get("document", torch.zeros(0)).clone()
        self._then = batch.on_mean
        self._has_graph = False
        self.sums: dict[int, torch.Tensor] = {}
        """Sums over the calls with values [B/W] (1) and [B/W, T] (2). The calls for micro-batches have zeros elsewhere."""

    def add(self, losses: torch.Tensor) -> None:
        """Add the values of one call. Values without a graph are measures, and no loss, if others have one."""
        self._then(losses)
        dim, mine = losses.dim(), losses.detach()
        if dim in (1, 2) and len(losses) == len(self._valid) and losses.requires_grad >= self._has_graph:
            known = self.sums if losses.requires_grad == self._has_graph else {}
            self.sums = {**known, dim: known[dim] + mine if dim in known else mine}
            self._has_graph = losses.requires_grad

    def read(self) -> list[Parts]:
        """Return the losses of each slot, those of documents as the mean over their tokens."""
        whole = self.sums.get(1, torch.zeros(len(self._valid))).cpu().double().tolist()
        parts = [[(loss, 1)] for loss in whole]
        if 2 in self.sums:
            tokens = self.sums[2].cpu().double().numpy()
            for slot, document in enumerate(self._document.numpy()):
                items = np.bincount(document)[1:]
                means = np.bincount(document, np.where(document > 0, tokens[slot], 0.0))[1:] / items + whole[slot]
                parts[slot] = list(zip(means.tolist(), items.tolist(), strict=True))
        return [part if valid and self.sums else [] for part, valid in zip(parts, self._valid.tolist(), strict=True)]
