"""Losses of single samples, as the script passes them to `Batch.mean` and `Batch.token_mean`.

The tensors stay on their device, without their graph, until they are read.
"""

from collections import deque
from dataclasses import replace

import numpy as np
import torch

from dlac_pipeline.read.batch import Batch

SampleLoss = tuple[int, float, int]
"""Slot in the global batch, loss, and items: of a sample, or of each of its documents in their order."""


class SampleLosses:
    """The losses of this rank's samples in the last `steps` steps."""

    def __init__(self, rank: int, *, steps: int) -> None:
        self._rank = rank
        self._steps: deque[_StepLosses] = deque(maxlen=steps)

    def watch(self, batch: Batch) -> Batch:
        """Return the batch, whose losses are kept when the script requests their mean."""
        if not self._steps.maxlen:
            return batch
        self._steps.append(_StepLosses(batch))
        return replace(batch, on_mean=self._steps[-1].add)

    @property
    def is_given(self) -> bool:
        """True if the script gave losses of the last batch, or had none yet."""
        return not self._steps or bool(self._steps[-1].sums)

    def of(self, step: int) -> list[SampleLoss]:
        """Return the losses of a step, by slot. Empty if the script gave none, or if the step is not kept."""
        return [
            (self._rank * len(each.batch.valid) + slot, loss, items)
            for each in self._steps
            if each.batch.step == step
            for slot, losses in enumerate(each.read())
            for loss, items in losses
        ]


class _StepLosses:
    """The losses of one step of this rank."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._has_graph = False
        self.sums: dict[int, torch.Tensor] = {}
        """Sums over the calls with values [B/W] (1) and [B/W, T] (2). The calls for micro-batches have zeros elsewhere."""

    def add(self, losses: torch.Tensor) -> None:
        """Add the values of one call. Values without a graph are measures, and no loss, if others have one."""
        self.batch.on_mean(losses)
        dim, mine = losses.dim(), losses.detach()
        if dim in (1, 2) and len(losses) == len(self.batch.valid) and losses.requires_grad >= self._has_graph:
            known = self.sums if losses.requires_grad == self._has_graph else {}
            self.sums = {**known, dim: known[dim] + mine if dim in known else mine}
            self._has_graph = losses.requires_grad

    def read(self) -> list[list[tuple[float, int]]]:
        """Return loss and items of each slot, or of each of its documents: the mean over its tokens. Empty slots have none."""
        if not self.sums:
            return []
        zeros = torch.zeros(len(self.batch.valid))
        whole = self.sums.get(1, zeros).double().tolist()
        parts = [[(loss, 1)] for loss in whole]
        if 2 in self.sums:
            tokens = self.sums[2].double().cpu().numpy()
            for slot, document in enumerate(self.batch["document"].cpu().numpy()):
                items = np.bincount(document)[1:]
                sums = np.bincount(document, np.where(document > 0, tokens[slot], 0.0))[1:]
                parts[slot] = [
                    (whole[slot] + total / n, n) for total, n in zip(sums.tolist(), items.tolist(), strict=True)
                ]
        return [part if valid else [] for part, valid in zip(parts, self.batch.valid.tolist(), strict=True)]
