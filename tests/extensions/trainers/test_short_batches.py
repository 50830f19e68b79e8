"""Trainers on a table that does not fill the last batch have the weights of a plain loop with `batch.mean`."""

from typing import Any

import pytest
import torch

from dlac_pipeline.extensions.trainers.torchtitan import attach_run
from tests.conftest import Arena
from tests.extensions.trainers.test_trainer_files import POINTS, make_points, opened_run
from tests.programs import train_short
from tests.programs.train_titan import TitanLike

transformers: Any = pytest.importorskip("transformers")
_SPEC: dict[str, Any] = {"columns": ["row_id", "x", "even"], "passes": 1, "every_steps": 4, "program": "train_short.py"}


def weights_of(arena: Arena, trainer: str, ranks: int, **params: Any) -> dict[str, torch.Tensor]:
    """Train in this process, or with two ranks. Return the final weights, and how many rows of zeros the model was given."""
    path = arena.home / f"{trainer}.pt"
    settings = {**_SPEC, "trainer": trainer, "weights": path, **params}
    if ranks == 1:
        with opened_run(arena, trainer, **settings) as run:
            train_short.train(run)
    else:
        launch = arena.launch(arena.spec(trainer, **settings))
        assert launch.wait() == 0, launch.stderr[-3000:]
    weights: dict[str, torch.Tensor] = torch.load(path)
    return weights


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Check that the weights differ by rounding only."""
    for name in expected.keys() - {"zeros"}:
        torch.testing.assert_close(found[name], expected[name], msg=name)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("ranks", "left", "trainers"),
    [
        *((1, left, ("huggingface", "labels", "accelerate", "lightning")) for left in (13, 1)),
        *((2, 1, ("huggingface", "labels", "lightning")), (2, 13, ("accelerate", "lightning"))),
    ],
)
def test_short_batch_weighs_its_rows(arena: Arena, ranks: int, left: int, trainers: tuple[str, ...]) -> None:
    """No row of zeros reaches the model, and each row of the last batch counts once, as with `batch.mean`, on any rank."""
    arena.table(appends=(256 + left,))
    plain = weights_of(arena, "plain", ranks, micro_batches=1)
    for trainer in trainers:
        found = weights_of(arena, trainer, ranks, micro_batches=2)
        assert found["zeros"] == 1 or ranks > 1  # the row 0
        assert_close(found, plain)
        assert arena.losses(trainer) == pytest.approx(arena.losses("plain"), rel=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is deprecated:FutureWarning")
def test_torchtitan_weighs_short_batch(arena: Arena) -> None:
    """Its sums over labels ignore empty micro-batches, and are the means of a plain loop."""
    make_points(arena, count=2 * 160 + 43)
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
