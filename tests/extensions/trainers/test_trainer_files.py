"""Files of other trainers as checkpoints: commits, resumes, and refusals."""

import json
import os
import runpy
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

import dlac_pipeline as dlac
from dlac_pipeline.extensions.trainers import torchtitan as titan
from dlac_pipeline.extensions.trainers.trainer_files import TrainerFiles
from dlac_pipeline.lakehouse.errors import Fenced, ResumeMismatch, ScriptInvalid, SpecInvalid
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.train.training_run import TrainingRun
from tests.conftest import Arena
from tests.programs.train_short import Network, train_huggingface, train_lightning
from tests.programs.train_titan import TitanLike

transformers: Any = pytest.importorskip("transformers")
_TRAINERS = Path(__file__).parents[3] / "examples" / "trainers"
_STEPS = 125
POINTS: dict[str, Any] = {
    **{"table": "src.points", "columns": ["x", "y"], "batch_size": 160, "passes": 1, "every_steps": 5},
}


@contextmanager
def opened_run(arena: Arena, name: str = "r", *, takeover: bool = False, **changes: Any) -> Iterator[TrainingRun]:
    """Open a run of one rank in this process."""
    spec = arena.spec(name, **{"every_steps": 20, "columns": ["row_id", "x", "even"], **changes})
    with arena.training_run(spec, takeover=takeover) as run:
        yield run


def make_points(arena: Arena, table: str = "src.points", *, count: int = 3_200) -> None:
    """Make a table of points."""
    x = np.linspace(0, 1, count, dtype=np.float32)
    points = pa.table({"x": x, "y": 3 * x})
    arena.lakehouse.create_namespace(table.partition(".")[0])
    arena.lakehouse.catalog.create_table(table, points.schema).append(points)


class DyingTitan(TitanLike):
    """A trainer whose process dies before the end of a step."""

    def __init__(self, run: TrainingRun, dies_at: int) -> None:
        super().__init__(run)
        self.dies_at = dies_at

    def train_step(self, batches: Iterator[Any]) -> None:
        """Train a step, or die."""
        if self.step == self.dies_at:
            raise KeyboardInterrupt
        super().train_step(batches)


class Counter:
    """A trainer whose state is the number of its steps, in two files."""

    def __init__(self) -> None:
        self.steps = 0

    def save(self, folder: Path) -> None:
        """Write the files."""
        (folder / "part").mkdir(parents=True)
        (folder / "part" / "steps.json").write_text(json.dumps(self.steps))
        (folder / "large.bin").write_bytes(bytes(range(256)) * 50_000)

    def load(self, folder: Path) -> None:
        """Read them."""
        assert (folder / "large.bin").stat().st_size == 256 * 50_000
        self.steps = json.loads((folder / "part" / "steps.json").read_text())

    def train(self, run: TrainingRun, *, until: int | None = None) -> None:
        """Train to the end, or fail before a step."""
        files = TrainerFiles(self.save, self.load)
        run.restore(files)
        assert (files.folder is None) == (run.step == 0)
        for batch in run.batches():
            if batch.step == until:
                run.settle()
                raise RuntimeError("crash")
            self.steps += 1
            run.step_done(batch.mean(batch["x"].sum(-1)))


@pytest.mark.parametrize(
    ("mode", "places"), [pytest.param("synchronous", (), marks=pytest.mark.slow), ("asynchronous", ("store", "local"))]
)
def test_files_are_resumed_from(arena: Arena, mode: str, places: tuple[str, ...]) -> None:
    """They come back from the store if the node has lost its copy. The steps count once."""
    arena.table()
    changes: dict[str, Any] = {"mode": mode, "passes": 1, **{name: str(arena.home / name) for name in places}}
    with pytest.raises(RuntimeError, match="crash"), opened_run(arena, **changes) as run:
        Counter().train(run, until=50)
    if places:
        for path in (arena.home / "local" / "r").rglob("large.bin"):
            path.unlink()
    trainer = Counter()
    with opened_run(arena, **changes) as run:
        assert run.step == 40
        trainer.train(run)
    assert trainer.steps == 63
    assert [row.step for row in arena.lineage("r")] == [20, 40, 60, 63]


def test_loader_state_must_be_ledgers(arena: Arena) -> None:
    """A state of another step, plan or run is refused. The current one is accepted and moves nothing."""
    arena.table()
    with opened_run(arena) as run:
        loader = run.loader(micro_batches=4)
        assert (len(loader), loader.batch_size) == (_STEPS * 4, 8)
        state = loader.state_dict()
        loader.load_state_dict(json.loads(json.dumps(state)))
        for name, value in (("step", 20), ("run", "other"), ("plans", []), ("leg", 3)):
            with pytest.raises(ResumeMismatch, match=name):
                loader.load_state_dict({**state, name: value})
        with pytest.raises(SpecInvalid, match="divides the 32 samples"):
            run.loader(micro_batches=5)


def test_loader_cuts_batches(arena: Arena) -> None:
    """The parts of a batch are its samples in order. The next batch needs the end of the step."""
    arena.table()
    with opened_run(arena) as run:
        run.restore(TrainerFiles(Counter().save))
        parts = iter(run.loader(lambda batch: [batch["row_id"], {"n": 1}], micro_batches=4))
        first = [next(parts) for _ in range(4)]
        assert all(len(rows) == 8 and facts == {"n": 1} for rows, facts in first)
        assert len(set(torch.cat([rows for rows, _ in first]).tolist())) == 32
        with pytest.raises(ScriptInvalid, match="step_done"):
            next(parts)


class Points(torch.nn.Module):
    """A model of points with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        return {"loss": torch.nn.functional.mse_loss(self.layers(x[:, None])[:, 0], y)}


def to_points(batch: dlac.Batch) -> dict[str, torch.Tensor]:
    """Return the arguments of the model of points."""
    return {"x": batch["x"], "y": batch["y"]}


@pytest.mark.slow
def test_uncommitted_save_is_not_resumed(arena: Arena) -> None:
    """The process dies between the Trainer's save and the commit. The Trainer's folder is newer, and is not used."""
    arena.table()
    taken = dlac.TrainingRun.checkpoint

    def die_at_40(run: TrainingRun) -> None:
        if run.step == 40:
            raise RuntimeError("crash")
        taken(run)

    arena.monkeypatch.setattr(dlac.TrainingRun, "checkpoint", die_at_40)
    with pytest.raises(RuntimeError, match="crash"), opened_run(arena, passes=1) as run:
        train_huggingface(run, Network(), 1, output_dir=str(arena.home / "out"))
    assert (arena.home / "out" / "checkpoint-40" / "trainer_state.json").exists()
    arena.monkeypatch.setattr(dlac.TrainingRun, "checkpoint", taken)
    with opened_run(arena, passes=1) as run:
        assert run.step == 20
        folder = train_huggingface(run, Network(), 1, output_dir=str(arena.home / "out"))
    assert folder is not None
    assert "step-000000020" in folder
    assert len(arena.losses("r")) == 63


@pytest.mark.slow
def test_second_process_fences_trainer(arena: Arena) -> None:
    """The Trainer of the first process trains until its next save, which is refused."""
    arena.table()

    class Intruder(transformers.TrainerCallback):  # type: ignore[misc]  # found at run time only
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 30:
                with opened_run(arena, takeover=True):
                    pass

    with pytest.raises(Fenced), opened_run(arena) as run:
        train_huggingface(run, Network(), 1, Intruder(), output_dir=str(arena.home / "out"))
    assert [row.step for row in arena.rows("r", CheckpointRow)] == [20]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"save_only_model": True}, "save_only_model=False"), ({"max_steps": -1, "num_train_epochs": 3}, "max_steps=125")],
)
def test_inexact_arguments_are_refused(arena: Arena, arguments: dict[str, Any], message: str) -> None:
    """Settings with which the Trainer could not resume exactly are named."""
    arena.table()
    with opened_run(arena) as run, pytest.raises(SpecInvalid, match=message):
        train_huggingface(run, Network(), 1, **arguments, output_dir=str(arena.home / "out"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:.*is deprecated:FutureWarning")
def test_torchtitan_protocol_resumes_exactly(arena: Arena) -> None:
    """A trainer with torchtitan's interfaces dies between two checkpoints, and has the losses of an undisturbed run."""
    make_points(arena)
    for name, dies_at in (("killed", 12), ("killed", 0), ("alone", 0)):
        with suppress(KeyboardInterrupt), opened_run(arena, name, **POINTS) as run:
            trainer = DyingTitan(run, dies_at)
            titan.attach_run(trainer, run)
            trainer.train()
    assert len(arena.losses("killed")) == 20
    assert arena.losses("killed") == arena.losses("alone")
    assert (arena.lineage("killed")[1].step, arena.lineage("killed")[-1].step) == (10, 20)


@pytest.mark.filterwarnings("default")
def test_inexact_lightning_models_are_refused(arena: Arena) -> None:
    """Lightning cannot tell the steps of a model that optimizes manually, nor of a run of unknown length."""
    pytest.importorskip("lightning")
    from lightning.pytorch import LightningModule

    from dlac_pipeline.extensions.trainers.lightning import DlacCheckpoint

    make_points(arena)
    model = LightningModule()
    with opened_run(arena, **POINTS) as run:
        checkpoint = DlacCheckpoint(run, model)
        checkpoint.setup(None, model, "fit")
        with pytest.raises(ResumeMismatch, match="found it at step 7"):
            checkpoint.on_train_start(SimpleNamespace(global_step=7), model)
        model.automatic_optimization = False
        with pytest.raises(SpecInvalid, match="manual"):
            checkpoint.setup(None, model, "fit")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_lightning_validation_changes_no_loss(arena: Arena) -> None:
    """Validation after the step of a checkpoint draws random numbers, before a crash as in an undisturbed run."""
    pytest.importorskip("lightning")
    make_points(arena)

    def die(dies_at: int, step: int) -> None:
        if step == dies_at:
            raise RuntimeError("crash")

    validation: torch.utils.data.DataLoader[int] = torch.utils.data.DataLoader(range(8), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    for name, dies_at in (("killed", 12), ("killed", -1), ("alone", -1)):
        with suppress(RuntimeError), opened_run(arena, name, **POINTS) as run:
            train_lightning(run, Points(), 1, to_points, partial(die, dies_at), validation)
    assert len(arena.losses("killed")) == 20
    assert arena.losses("killed") == arena.losses("alone")
    assert {row.attempt for row in arena.lineage("killed")} == {1, 2}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("stops_at", [9, 8])
def test_lightning_stops_at_checkpoint_step(arena: Arena, stops_at: int) -> None:
    """A stop request that arrives in a step whose checkpoint is due ends Lightning's loop after that step, as any other does."""
    pytest.importorskip("lightning")
    make_points(arena)

    def stop(signal_at: int, step: int) -> None:
        if step == signal_at:
            os.kill(os.getpid(), signal.SIGTERM)

    for name, signal_at in (("stopped", stops_at), ("stopped", -1), ("alone", -1)):
        with opened_run(arena, name, **POINTS) as run:
            train_lightning(run, Points(), 1, to_points, partial(stop, signal_at))
            assert run.step == (20 if signal_at == -1 else 10)
            assert not list(run.batches())
    assert arena.losses("stopped") == arena.losses("alone")


@pytest.mark.filterwarnings("default")
@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_accelerate.py", "train_lightning.py"])
def test_example_resumes_after_crash(arena: Arena, script: str) -> None:
    """A script raises in a step and is run again in this process, and has the losses of an undisturbed run."""
    make_points(arena, "demo.points", count=19_877)
    arena.monkeypatch.setenv("DLAC_HOME", str(arena.home))
    for name, dies_at in (("killed", 50), ("killed", 0), ("alone", 0)):
        run_example(arena, script, name, dies_at=dies_at)
    assert len(arena.losses("killed")) == 125
    assert arena.losses("killed") == arena.losses("alone")
    assert {row.attempt for row in arena.lineage("killed")} == {1, 2}


def run_example(arena: Arena, script: str, name: str, *, dies_at: int) -> None:
    """Run an example script without its pauses, up to the pause of a step if `dies_at` is one."""
    job = (_TRAINERS / "job.toml").read_text().replace('run = "points"', f'run = "{name}"')
    (arena.home / "job.toml").write_text(job)
    sleep, pauses = time.sleep, iter(range(1, 1_000))

    def pause(seconds: float) -> None:
        """Do not sleep if the script asks for it."""
        if seconds not in (0.03, 0.015):
            sleep(seconds)
        elif next(pauses) == dies_at / (seconds / 0.03):
            raise RuntimeError("crash")

    with arena.monkeypatch.context() as patched, suppress(RuntimeError):
        patched.chdir(arena.home)
        patched.setattr(time, "sleep", pause)
        runpy.run_path(str(_TRAINERS / script))
