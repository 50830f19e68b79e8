"""Calls of a training run in an order that would part the model from the ledger: refused, or without an effect on either."""

from __future__ import annotations

from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING

import pytest
import torch
import yaml

import dlac_pipeline as dlac
from dlac_pipeline.checkpoint.engines import TorchState
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.lakehouse.errors import CursorMismatch, ResumeMismatch, ScriptInvalid

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Arena


@pytest.fixture
def job(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of 15 steps with a checkpoint every 5."""
    monkeypatch.setenv("DLAC_HOME", str(arena.home))
    arena.table(appends=(70, 50), row_group_rows=20)
    spec = arena.spec("r1", world_size=1, batch_size=16, key_groups=4, every_steps=5)
    path = arena.home / "r1.yaml"
    path.write_text(yaml.safe_dump(spec.model_dump()))
    return path


def counter() -> torch.nn.Linear:
    """A model whose weight counts the steps that it has."""
    model = torch.nn.Linear(1, 1)
    torch.nn.init.zeros_(model.weight)
    return model


def count(model: torch.nn.Linear) -> None:
    """Train a step."""
    with torch.no_grad():
        model.weight += 1


def counted(arena: Arena) -> list[tuple[int, float]]:
    """Return (step, steps in the weights) of each checkpoint."""
    parts = [(row.step, TorchState.parts_in(folder_of(row.manifest_uri))) for row in arena.lineage("r1")]
    return [(step, found["model"]["weight"].item()) for step, found in parts]


def test_second_restore_is_refused(arena: Arena, job: Path) -> None:
    """It would load the resume point over later steps, which the ledger has as trained."""
    for _ in range(2):
        with dlac.training_run(job) as run:
            model = counter()
            run.restore(model=model)
            for _ in islice(run.batches(), 3):
                count(model)
                run.step_done(0.0)
            with pytest.raises(ScriptInvalid, match="a second one"):
                run.restore(model=model)
    assert counted(arena) == [(3, 3.0), (5, 5.0), (6, 6.0)]


def test_script_cannot_train_after_a_failed_restore(arena: Arena, job: Path) -> None:
    """A script that catches the error would continue the ledger with a new model."""
    with dlac.training_run(job) as run:
        model = counter()
        run.restore(model=model)
        for _ in islice(run.batches(), 2):
            count(model)
            run.step_done(0.0)
    with dlac.training_run(job) as run:
        with suppress(ResumeMismatch):
            run.restore(dlac.DistributedState(model=model))
        with pytest.raises(ScriptInvalid, match=r"before run\.batches"):
            next(run.batches())
    assert counted(arena) == [(2, 2.0)]


def test_checkpoint_within_a_step_is_refused(arena: Arena, job: Path) -> None:
    """The weights may have a batch that the ledger would not name."""
    with dlac.training_run(job) as run:
        model = counter()
        run.restore(model=model)
        for batch in islice(run.batches(), 3):
            count(model)
            if batch.step == 3:
                with pytest.raises(ScriptInvalid, match="of step 3"):
                    run.checkpoint()
            run.step_done(0.0)
    assert counted(arena) == [(3, 3.0)]


def test_due_checkpoint_precedes_another_loop(arena: Arena, job: Path) -> None:
    """A script with a loop for each of its epochs leaves the first one after a step with a checkpoint."""
    with dlac.training_run(job) as run:
        model = counter()
        run.restore(model=model)
        for last in (5, 15):
            for batch in run.batches():
                count(model)
                run.step_done(0.0)
                if batch.step == last:
                    break
    assert counted(arena) == [(5, 5.0), (10, 10.0), (15, 15.0)]


def test_nothing_is_committed_after_a_kept_error(arena: Arena, job: Path) -> None:
    """The weights have a step that was refused, because the batch before it was left out."""
    with dlac.training_run(job) as run:
        model = counter()
        run.restore(model=model)
        for batch in run.batches():
            if batch.step == 4:
                break
            count(model)
            run.step_done(0.0)
        with suppress(CursorMismatch):
            for _ in run.batches():
                count(model)
                run.step_done(0.0)
    assert counted(arena) == []
