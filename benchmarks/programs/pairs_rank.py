"""The rank of benchmarks/pairs.py: a small model with any engine, and a log that judges DLAC without its help.

The log has a line per rank, attempt and step, written to the disk after all work on the step: rows in the tensors, digests of
weights, optimizer state and generators before and after, and the learning rate. The schedule steps after `run.step_done`, as in
many scripts. The first line has the step with which a process begins. A line of the kind `share` precedes, because a replica
group may die in a step that the others commit.

Params: the `engine`, the folder `log`, `pause_s`, `slow`: a file with which steps are longer, `again`: a file with which one
process dies after its restore.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import dlac_pipeline as dlac
from dlac_pipeline.extensions.trainers.trainer_files import TrainerFiles

WIDTH = 8


class Trained:
    """A model with its optimizer and schedule, and how a step is made."""

    def __init__(self, run: dlac.TrainingRun) -> None:
        self.run = run
        self.model: Any = torch.nn.Sequential(
            torch.nn.Linear(4, WIDTH), torch.nn.Dropout(0.1), torch.nn.Linear(WIDTH, 1)
        )
        self.state: Any = None
        self.prepare()

    def prepare(self) -> None:
        """Make the optimizer, and restore."""
        self.make()
        kind = dlac.TorchFTState if self.run.spec.launch.replicas else dlac.TorchState
        self.state = kind(model=self.model, optimizer=self.optimizer, schedule=self.schedule)
        self.run.restore(self.state)

    def make(self) -> None:
        """Make optimizer and schedule of the model."""
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule: Any = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)

    def step(self, loss: torch.Tensor) -> bool:
        """Make an optimizer step. Return whether it commits."""
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.average_gradients()
        if isinstance(self.state, dlac.TorchFTState) and not self.state.reduce(loss):
            return False
        self.optimizer.step()
        return True

    def average_gradients(self) -> None:
        """Average the gradients over the ranks."""
        for parameter in self.model.parameters() if self.run.world_size > 1 else ():
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.run.world_size

    def finish(self) -> None:
        """Work on after the step is recorded."""
        self.schedule.step()

    @contextmanager
    def gathered(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the whole weights, by name. Collective."""
        yield {
            name: value.full_tensor() if isinstance(value, DTensor) else value
            for name, value in self.model.state_dict().items()
        }

    def moments(self) -> list[torch.Tensor]:
        """Return this rank's part of the optimizer's state."""
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        values = [value for state in optimizer.state.values() for _, value in sorted(state.items())]
        return [each.to_local() if isinstance(each, DTensor) else each for each in values if torch.is_tensor(each)]


class Sharded(Trained):
    """The model sharded by FSDP2."""

    def prepare(self) -> None:
        """Shard, make the optimizer, and restore."""
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer)
        self.make()
        kind: Any = dlac.TorchFTState if self.run.spec.launch.replicas else dlac.DistributedState
        self.state = kind(model=self.model, optimizer=self.optimizer, schedule=self.schedule)
        self.run.restore(self.state)

    def average_gradients(self) -> None:
        """FSDP has averaged them."""


class Zero(Trained):
    """The model with DeepSpeed, which steps the schedule itself."""

    def prepare(self) -> None:
        """Make the engine, and restore."""
        import deepspeed

        spec = self.run.spec
        config = {
            "train_micro_batch_size_per_gpu": spec.order.batch_size // self.run.world_size,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "torch_adam": True}},
            "zero_optimization": {"stage": int(spec.params["engine"][-1])},
        }
        schedule: Callable[[Any], Any] = lambda made: torch.optim.lr_scheduler.LambdaLR(made, lambda step: 0.97**step)  # noqa: E731
        engine, self.optimizer, _, self.schedule = deepspeed.initialize(
            model=self.model, config=config, lr_scheduler=schedule
        )
        self.bare, self.model = self.model, engine
        self.run.restore(engine)

    def step(self, loss: torch.Tensor) -> bool:
        """Make an optimizer step."""
        self.model.backward(loss)
        self.model.step()
        return True

    def finish(self) -> None:
        """DeepSpeed has stepped the schedule."""

    @contextmanager
    def gathered(self) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the whole weights, by name. Collective."""
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(self.bare.parameters())):
            yield dict(self.bare.state_dict())


class OwnFiles(Trained):
    """A trainer with files of its own."""

    def prepare(self) -> None:
        """Make the optimizer, and restore."""
        self.make()
        self.run.restore(TrainerFiles(self.save, self.load, modules={"model": self.model}))

    def parts(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}

    def save(self, folder: Path) -> None:
        """Let rank 0 write the file."""
        if self.run.rank == 0:
            torch.save({name: part.state_dict() for name, part in self.parts().items()}, folder / "state.pt")

    def load(self, folder: Path) -> None:
        """Read the file."""
        saved = torch.load(folder / "state.pt", weights_only=True)
        for name, part in self.parts().items():
            part.load_state_dict(saved[name])


def trained_by(engine: str) -> type[Trained]:
    """Return the class for an engine."""
    return {"torch": Trained, "dcp": Sharded, "trainer": OwnFiles}.get(engine, Zero)


def digest_of(tensors: list[torch.Tensor]) -> str:
    """Return a digest of the bits of tensors."""
    digest = blake2b(digest_size=16)
    for each in tensors:
        digest.update(each.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def digests(trained: Trained) -> dict[str, str]:
    """Return the digests of the whole state. Collective."""
    with trained.gathered() as weights:
        whole = digest_of([weights[name] for name in sorted(weights)])
    return {"weights": whole, "moments": digest_of(trained.moments()), "generator": digest_of([torch.get_rng_state()])}


def rows_of(batch: dlac.Batch) -> list[int]:
    """Return the rows in the tensors. Each token of a document is its row."""
    if "tokens" in batch.tensors:
        found: list[int] = batch["tokens"][batch["document"] > 0].tolist()
        return found
    return list(batch["row_id"][batch.valid].tolist())


def loss_of(trained: Trained, batch: dlac.Batch) -> torch.Tensor:
    """Return the loss of a batch."""
    if "tokens" in batch.tensors:
        features = torch.sin(batch["tokens"][..., None] * torch.tensor([1.0, 2.0, 3.0, 4.0]))
        return batch.token_mean((trained.model(features).squeeze(-1) - features.sum(-1)) ** 2)
    features = batch["x"].to(torch.float32)
    target = features.sum(-1) + torch.sin(7.0 * batch["row_id"])  # no model predicts it
    return batch.mean((trained.model(features).squeeze(-1) - target) ** 2)


def die_again(run: dlac.TrainingRun) -> None:
    """Die if this process is the first after the file was made. A job with a secret names it in an exception."""
    again = Path(run.spec.params["again"])
    try:
        again.unlink()
    except FileNotFoundError:
        return
    if "PAIRS_PASSWORD" in os.environ:
        raise RuntimeError(f"the database refuses password {os.environ['PAIRS_PASSWORD']} now")
    os.kill(os.getpid(), signal.SIGKILL)


def write(log: TextIO, **facts: Any) -> None:
    """Append a line to the log, on the disk."""
    log.write(json.dumps({**facts, "pid": os.getpid(), "at": time.time()}) + "\n")
    log.flush()
    os.fsync(log.fileno())


def train(run: dlac.TrainingRun) -> None:
    """Train to the end of the order, with a log."""
    params, point = run.spec.params, run.resume_point
    torch.manual_seed(5)
    trained = trained_by(params["engine"])(run)
    die_again(run)
    pause_s, slow = float(params["pause_s"]), Path(params["slow"])
    with (Path(params["log"]) / f"{run.spec.run}-{run.rank}-{os.getpid()}.jsonl").open("a") as log:
        write(log, kind="begin", attempt=point.attempt, step=run.step + 1)  # it may have no row left to train on
        for batch in run.batches():
            facts = {"attempt": point.attempt, "step": batch.step, "rank": run.rank, "ranks": batch.readers}
            share = {**facts, "rows": rows_of(batch), "before": digests(trained)}
            write(log, **share, kind="share")
            done = trained.step(loss := loss_of(trained, batch))
            run.step_done(loss)
            if done:
                trained.finish()
                write(log, **share, kind="step", after=digests(trained), lr=trained.schedule.get_last_lr()[0])
            time.sleep(0.25 if slow.exists() else pause_s)


if __name__ == "__main__":
    with dlac.training_run() as the_run:
        train(the_run)
