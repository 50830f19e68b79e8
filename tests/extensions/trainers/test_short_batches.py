"""Trainers on a table that does not fill the last batch have the weights of a plain loop with `batch.mean`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from dlac_pipeline.extensions.trainers.torchtitan import attach_run
from dlac_pipeline.lakehouse.errors import ScriptInvalid
from tests.extensions.trainers.test_trainer_files import POINTS, make_points, opened_run
from tests.programs import train_short
from tests.programs.train_titan import TitanLike

if TYPE_CHECKING:
    from tests.conftest import Arena

transformers: Any = pytest.importorskip("transformers")
_SPEC: dict[str, Any] = {
    "columns": ["row_id", "x", "even"],
    "passes": 1,
    "every_steps": 4,
    "program": "train_short.py",
}


def weights_of(arena: Arena, trainer: str, **params: Any) -> dict[str, torch.Tensor]:
    """Train in this process with one rank. Return the final weights, and how many rows of zeros the model was given."""
    path = arena.home / f"{trainer}.pt"
    with opened_run(arena, trainer, **_SPEC, trainer=trainer, weights=path, **params) as run:
        train_short.train(run)
    weights: dict[str, torch.Tensor] = torch.load(path)
    return weights


def launched_weights_of(arena: Arena, trainer: str, **params: Any) -> dict[str, torch.Tensor]:
    """Train with two ranks. Return the final weights."""
    path = arena.home / f"{trainer}.pt"
    launch = arena.launch(arena.spec(trainer, **_SPEC, trainer=trainer, weights=path, **params))
    assert launch.wait() == 0, launch.stderr[-3000:]
    weights: dict[str, torch.Tensor] = torch.load(path)
    return weights


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that the weights differ by rounding only."""
    for name in expected.keys() - {"zeros"}:
        torch.testing.assert_close(found[name], expected[name], msg=name)


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("left", [pytest.param(13, marks=pytest.mark.slow), 1])
def test_short_batch_weighs_its_rows(arena: Arena, left: int) -> None:
    """No row of zeros reaches the model, and each row of the last batch counts once. A loop of `batch.mean` is the judge."""
    arena.table(appends=(256 + left,))
    plain = weights_of(arena, "plain", micro_batches=1)
    for trainer in ("huggingface", "labels", "accelerate", "lightning"):
        found = weights_of(arena, trainer, micro_batches=2)
        assert found["zeros"] == 1  # the row 0
        assert_close(found, plain)
        assert arena.losses(trainer) == pytest.approx(arena.losses("plain"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("left", "trainers"), [(1, ("huggingface", "labels", "lightning")), (13, ("accelerate", "lightning"))]
)
def test_ranks_weigh_short_batch(arena: Arena, left: int, trainers: tuple[str, ...]) -> None:
    """Two ranks have different numbers of rows in the last batch, or a rank has none."""
    arena.table(appends=(256 + left,))
    plain = launched_weights_of(arena, "plain", micro_batches=1)
    for trainer in trainers:
        assert_close(launched_weights_of(arena, trainer, micro_batches=2), plain)
        assert arena.losses(trainer) == pytest.approx(arena.losses("plain"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("left", [43, 1])
def test_torchtitan_weighs_short_batch(arena: Arena, left: int) -> None:
    """Its sums over labels ignore empty micro-batches, and are the means of a plain loop."""
    make_points(arena, count=2 * 160 + left)
    with opened_run(arena, "titan", **POINTS) as run:
        trainer = TitanLike(run)
        trainer.model.eval()  # no dropout
        attach_run(trainer, run)
        trainer.train()
    with opened_run(arena, "plain", **POINTS) as run:
        network = TitanLike(run).model.eval()
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        run.restore(model=network, optimizer=optimizer)
        for batch in run.batches():
            loss = batch.mean((network(batch["x"][:, None])[:, 0] - batch["y"]) ** 2)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            run.step_done(loss)
    assert_close(dict(trainer.model.state_dict()), dict(network.state_dict()))


@pytest.mark.slow
def test_loss_without_weight_is_refused(arena: Arena) -> None:
    """A loader's plain mean is refused in the first step if a later batch is short, and taken if every batch is full."""
    arena.table(appends=(269,))

    def train(name: str, **changes: Any) -> int:
        with opened_run(arena, name, **{**_SPEC, "trainer": "none", **changes}) as run:
            run.restore(model=train_short.Network())
            for values in run.loader(train_short.to_model):
                run.step_done(values["y"].mean())
            return run.step

    with pytest.raises(ScriptInvalid, match=r"batch.weight, or let order.batch_size divide the rows"):
        train("short")
    assert train("full", row_filter="row_id < 256") == 8


@pytest.mark.slow
def test_own_training_step_must_weigh(arena: Arena) -> None:
    """A Trainer whose training_step does not ask for the Trainer's loss is refused once a batch is short."""
    arena.table(appends=(64 + 5,))

    def training_step(model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        loss: torch.Tensor = model(**inputs)["loss"]
        return loss.detach()

    arena.monkeypatch.setattr(transformers.Trainer, "training_step", staticmethod(training_step))
    with pytest.raises(ScriptInvalid, match="compute_loss"), opened_run(arena, passes=1) as run:
        train_short.train_huggingface(run, train_short.Network(), 2, output_dir=str(arena.home))
    assert not arena.lineage("r")


@pytest.mark.slow
def test_epoch_continues_after_resumption(arena: Arena) -> None:
    """The Trainer's log has the epoch of the step, whether it was resumed or not."""
    arena.table()

    class Watch(transformers.TrainerCallback):  # type: ignore[misc]  # found at run time only
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            epochs[state.global_step] = logs["epoch"]
            if state.global_step == stops_at:
                raise RuntimeError("crash")

    epochs: dict[int, float] = {}
    stops_at = 30
    with pytest.raises(RuntimeError, match="crash"), opened_run(arena, passes=1) as run:
        train_short.train_huggingface(
            run, train_short.Network(), 1, Watch(), logging_steps=1, output_dir=str(arena.home)
        )
    stops_at = 0
    with opened_run(arena, passes=1) as run:
        assert run.step == 20
        train_short.train_huggingface(
            run, train_short.Network(), 1, Watch(), logging_steps=1, output_dir=str(arena.home)
        )
    assert epochs == {step: pytest.approx(step / 63, abs=1e-4) for step in range(1, 64)}
