"""The door of loaders: the one of micro-batches, and one of another author, give a run's batches to a trainer."""

from pathlib import Path

import pytest
import torch

import dlac_pipeline as dlac
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import ScriptInvalid
from dlac_pipeline.train import training_run
from tests.conftest import Arena
from tests.installed import install_distribution

_PAIRS = """
from dlac_pipeline.lakehouse.errors import ScriptInvalid

class Pairs:
    def __init__(self, run, inputs, *, micro_batches, device):
        self.run, self.inputs, self.device, self.used = run, inputs, device, False

    def __iter__(self):
        for batch in self.run.batches(device=self.device):
            self.used, batch = False, self.watched(batch)
            yield batch if self.inputs is None else self.inputs(batch)

    def watched(self, batch):
        from dataclasses import replace
        return replace(batch, on_weight=lambda: setattr(self, "used", True))

    def check_weights(self, *, always_full):
        if not self.used and not always_full:
            raise ScriptInvalid("expected a loss with a weight")
"""


@pytest.fixture(params=["micro_batches", "pairs"], autouse=True)
def loader(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader of `TrainingRun.loader`."""
    if request.param == "pairs":
        points = {"test.loaders": ["micro_batches = pairs_loader:Pairs"]}
        (site := tmp_path / "site").mkdir()
        monkeypatch.syspath_prepend(str(install_distribution(site, "pairs", {"pairs_loader": _PAIRS}, points)))
        monkeypatch.setattr(training_run, "LOADERS", Door("test.loaders", "loader"))


@pytest.fixture
def run_name(arena: Arena) -> str:
    """A run of 100 rows, whose last batch is not full."""
    arena.table(appends=(100,))
    return "r"


def test_loader_gives_every_row(arena: Arena, run_name: str) -> None:
    """A trainer gets all batches of the run, in its own form, and each step is recorded."""
    seen: list[int] = []
    with arena.training_run(arena.spec(run_name, world_size=1, passes=1)) as run:
        run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
        for batch, rows in run.loader(lambda batch: (batch, batch["row_id"][batch.valid].tolist())):
            seen += rows
            run.step_done(batch.mean(batch["x"].sum(-1)))
        assert run.step == run.total_steps
    assert sorted(seen) == list(range(100))


def test_loss_without_weight_is_refused(arena: Arena, run_name: str) -> None:
    """A mean of the trainer's own counts samples of a batch that is not full too often."""

    def train() -> None:
        with arena.training_run(arena.spec(run_name, world_size=1, passes=1)) as run:
            run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
            for batch in run.loader():
                run.step_done(batch["x"].mean())

    with pytest.raises(ScriptInvalid, match="weight"):
        train()
