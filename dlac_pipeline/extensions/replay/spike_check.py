"""Loss spikes while a run trains, as `launch.on_spike` states. All ranks have the same losses, and so the same verdict."""

import json
import os
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np
import torch

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.checkpoint.step_sync import MAX_STEPS, StepSync
from dlac_pipeline.elastic.ranks.rank import LAUNCH_VARIABLE
from dlac_pipeline.extensions.replay.loss_spikes import (
    FACTOR,
    WINDOW,
    LossWindow,
    count_to_blame,
    finite_or_inf,
    recorded_losses,
)
from dlac_pipeline.lakehouse.errors import LossSpiked, ScriptInvalid
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.train.open_attempt import OpenAttempt

_READ = 20 * WINDOW
"""Steps whose losses are read from the ledger. Some of them may be NaN, or of steps that were not applied."""
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
        dim, mine = losses.dim(), losses.detach().clone()
        if dim in (1, 2) and len(losses) == len(self._valid) and losses.requires_grad >= self._has_graph:
            known = self.sums if losses.requires_grad == self._has_graph else {}
            self.sums = {**known, dim: known[dim] + mine if dim in known else mine}
            self._has_graph = losses.requires_grad

    def read(self) -> list[Parts]:
        """Return the losses of each slot. A document's loss is the mean over its tokens."""
        whole = self.sums.get(1, torch.zeros(len(self._valid))).cpu().double().tolist()
        parts = [[(loss, 1)] for loss in whole]
        if 2 in self.sums:
            tokens = self.sums[2].cpu().double().numpy()
            for slot, document in enumerate(self._document.numpy()):
                items = np.bincount(document)[1:]
                means = np.bincount(document, np.where(document > 0, tokens[slot], 0.0))[1:] / items + whole[slot]
                parts[slot] = list(zip(means.tolist(), items.tolist(), strict=True))
        return [part if valid and self.sums else [] for part, valid in zip(parts, self._valid.tolist(), strict=True)]


class SpikeCheck:
    """The check of one rank, and the losses of its samples as long as they may be needed."""

    def __init__(self, spec: JobSpec, attempt: OpenAttempt, tree: RankTree, warn: Callable[[str], None]) -> None:
        self._run, self._tree, self._warn = spec.run, tree, warn
        mesh = spec.launch.mesh
        self._has_losses = mesh.is_last_stage(tree.rank, tree.world_size)
        self._speaks = self._has_losses and mesh.is_first_of_stage(tree.rank, tree.world_size)
        self._policy = None if attempt.rehearses else spec.launch.on_spike
        if self._policy == "exclude" and LAUNCH_VARIABLE not in os.environ:
            self._policy = "stop"  # only a supervisor starts an attempt without these rows
        self._window = LossWindow(_losses_before(attempt, tree) if self._policy is not None else {})
        self._tolerated_step = attempt.point.spike_step
        # A spike is known after two messages of all ranks. A rehearsal keeps the losses of its last step.
        kept = 2 * MAX_STEPS if self._policy == "exclude" else int(attempt.rehearses)
        self._kept: deque[SampleLosses] = deque(maxlen=kept)

    def watch(self, batch: Batch) -> Batch:
        """Return the batch, whose losses are kept. Raise `ScriptInvalid` if the script gave none of the last one."""
        if not self._kept.maxlen or not self._has_losses:
            return batch
        if self._policy == "exclude" and self._kept and not self._kept[-1].sums:
            raise ScriptInvalid(
                "expected the loss of each sample by batch.mean, or of each token by batch.token_mean, found none in run "
                f'{self._run!r}: compute it without its mean (reduction="none"), or set launch.on_spike = "stop"'
            )
        self._kept.append(SampleLosses(batch))
        return replace(batch, on_mean=self._kept[-1].add)

    def check(self, sync: StepSync, *, skipped: Collection[int]) -> None:
        """Check the losses of a step message. Steps that were not applied do not count. Raise `LossSpiked` by policy."""
        for step, loss in enumerate(sync.losses, start=sync.step - len(sync.losses) + 1):
            if self._policy is None or step in skipped:
                continue
            if self._window.is_spike(loss):
                self._report(step, loss)
            self._window.add(loss)

    def gather(self, step: int) -> list[Parts]:
        """Return the losses of the samples of a step, by slot of the global batch, at rank 0. Collective."""
        found = next((each for each in self._kept if each.step == step), None)
        mine = found.read() if found is not None and self._speaks else []  # ranks of one share have the same slots
        return [parts for ranks in self._tree.gather(json.dumps(mine).encode()) or () for parts in json.loads(ranks)]

    def _report(self, step: int, loss: float) -> None:
        """Raise `LossSpiked`. If a restart cannot help, only warn. Collective."""
        found = (
            f"expected a loss of run {self._run!r} of at most {self._window.limit:.6g} ({FACTOR:g} deviations above the median "
            f"{self._window.middle:.6g} of the steps before), found {loss:.6g} at step {step}"
        )
        if self._policy == "stop":
            raise LossSpiked(
                f"{found}; no checkpoint has the step, the last committed one is kept: `dlac spike {self._run} --step {step}` "
                "ranks its rows and prints the rewind without the worst, then train again"
            )
        tolerated = step <= self._tolerated_step
        blamed = [] if tolerated else self._find_blamed(step)
        if not blamed:
            without = "without the rows that it blamed before" if tolerated else "no few rows to blame"
            self._warn(f"{found}, {without}: training continues")
            return
        err = LossSpiked(f"{found}, by {len(blamed)} of its samples: the next attempt leaves their rows out")
        err.detail = {"policy": "spikes", "step": step, "samples": blamed}
        raise err

    def _find_blamed(self, step: int) -> list[tuple[int, int, int]]:
        """Return the samples without which a step would be no spike: slot, and place among the documents of the slot."""
        samples = [
            (loss, items, (slot, place, len(parts)))
            for slot, parts in enumerate(self.gather(step))
            for place, (loss, items) in enumerate(parts)
        ]
        samples.sort(key=lambda sample: finite_or_inf(sample[0]), reverse=True)
        count = count_to_blame([sample[:2] for sample in samples], self._window.limit)
        mine = json.dumps([sample[2] for sample in samples[:count]]).encode()
        return [tuple(each) for each in json.loads(self._tree.broadcast(mine if self._tree.rank == 0 else None))]


def _losses_before(attempt: OpenAttempt, tree: RankTree) -> dict[int, float]:
    """Return the last losses before the resume point, by the ledger, which rank 0 reads. Collective."""
    losses: dict[int, float] = {}
    with failing_together(tree, doing="reading the losses of earlier steps"):
        if tree.rank == 0:
            ledger = Ledger(attempt.plans.lakehouse)
            rows = ledger.rows(attempt.name.run, kinds=(CheckpointRow,))
            losses = recorded_losses(ledger, rows, attempt.point.checkpoint_id, least=_READ)
            since = enumerate(attempt.tracker.losses, start=attempt.tracker.committed_step + 1)  # of a memory state
            losses |= {step: loss for step, loss in since if step not in attempt.tracker.skipped}
    return dict(json.loads(tree.broadcast(json.dumps(list(losses.items())).encode() if tree.rank == 0 else None)))
