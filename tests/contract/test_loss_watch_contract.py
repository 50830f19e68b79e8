"""The door of loss watches: the one for spikes, and one of another author, keep one contract."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.step_sync import StepSync
from dlac_pipeline.spec.mesh_spec import DATA_PARALLEL
from dlac_pipeline.train import loss_watch
from dlac_pipeline.train.loss_watch import LOSS_WATCHES, LossWatch, open_watch
from tests.extensions.replay.test_sample_losses import batch
from tests.installed import install_distribution

_QUIET = """
from dataclasses import replace

class Quiet:
    def __init__(self, spec, attempt, tree, warn):
        self.values = {}

    def watch(self, batch):
        return replace(batch, on_mean=lambda losses: self.values.setdefault(batch.step, losses.tolist()))

    def check(self, sync, *, skipped):
        if max(sync.losses) > 100:
            raise ValueError("of the test")

    def gather(self, step):
        return [[value] for value in self.values[step]]
"""


def opened(*, rehearses: bool, on_spike: str | None = None) -> LossWatch | None:
    """Return the watch of a run of one rank."""
    spec: Any = SimpleNamespace(run="r", launch=SimpleNamespace(on_spike=on_spike, mesh=DATA_PARALLEL))
    facts = SimpleNamespace(speaks=True, spike_step=0)
    attempt: Any = SimpleNamespace(rehearses=rehearses, tracker=facts, point=facts)
    return open_watch(spec, attempt, RankTree(0, 1, None), lambda message: None)


@pytest.fixture(params=["spikes", "quiet"])
def watch(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LossWatch:
    """The watch of a rehearsal."""
    points = {LOSS_WATCHES.group: ["quiet = quiet_watch:Quiet"]}
    monkeypatch.syspath_prepend(str(install_distribution(tmp_path, "quiet", {"quiet_watch": _QUIET}, points)))
    monkeypatch.setattr(loss_watch, "_OF_SPIKES", request.param)
    found = opened(rehearses=True)
    assert found is not None
    return found


def test_watched_batch_is_unchanged(watch: LossWatch) -> None:
    """The script gets the same batch, and the same means."""
    mine, values = batch(), torch.tensor([4.0, 6.0, 0.0], requires_grad=True)
    watched = watch.watch(batch())
    assert watched.tensors.keys() == mine.tensors.keys()
    assert watched.mean(values) == mine.mean(values)


def test_losses_of_last_step_are_gathered(watch: LossWatch) -> None:
    """Each slot of the global batch has its losses, of the step that is named."""
    for step in (1, 2):
        watch.watch(batch(step)).mean(torch.tensor([4.0 + step, 6.0, 0.0], requires_grad=True))
    gathered = watch.gather(2)
    assert len(gathered) == 3
    assert "6.0" in str(gathered[0])


def test_usual_losses_end_no_attempt(watch: LossWatch) -> None:
    """Losses as those before are no reason to end an attempt."""
    watch.check(StepSync(step=3, losses=[1.0, 1.1, 0.9]), skipped=())
