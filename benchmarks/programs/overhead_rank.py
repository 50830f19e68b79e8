"""The rank of benchmarks/overhead.py: the same training step alternates with and without `run.step_done`."""

import json
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

import dlac_pipeline as dlac
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import open_leg

_WIDTH, _VOCABULARY = 128, 512


class Model(torch.nn.Module):
    """An embedding, one transformer layer, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(_VOCABULARY, _WIDTH)
        self.layer = torch.nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True)
        self.head = torch.nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the cross entropy of the next token per sample, [B]."""
        logits = self.head(self.layer(self.embed(tokens[:, :-1])))
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return loss.view(len(tokens), -1).mean(1)


def main() -> None:
    """Alternate segments. Rank 0 writes the results."""
    with dlac.training_run() as run:
        steps, pairs = int(run.spec.params["steps"]), int(run.spec.params["pairs"])
        step_s = int(run.spec.params["step_ms"]) / 1e3
        square = torch.ones(64, 64)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        opened = open_leg(Plans(connect(run.spec.lakehouse)), Leg.from_json(run.resume_point.leg), run.spec)

        def train(batch: Batch) -> torch.Tensor:
            began = time.perf_counter()
            loss = batch.mean(model(batch["tokens"].long()))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            for parameter in model.parameters():
                assert parameter.grad is not None
                dist.all_reduce(parameter.grad)
                parameter.grad.div_(run.world_size)
            optimizer.step()
            while time.perf_counter() < began + step_s:
                square.mm(square)
            return loss

        def plain(step: int) -> float:
            reader = opened.reader(coordinate=run.coordinate, step=step)
            reader.prefetch.settle()  # the tracked side's reader has read ahead, too
            started = time.perf_counter()
            for batch in islice(reader, steps):
                train(batch).item()
            spent = (time.perf_counter() - started) / steps
            reader.close()
            return spent

        measured: dict[str, list[float]] = {
            name: [] for name in ("plain_s", "again_s", "tracked_s", "tracking_us", "checkpoint_s")
        }
        batches = run.batches()
        for pair in range(pairs + 1):
            before = run.step
            first = plain(before)
            spent, tracking_us, checkpoint = _tracked(run, batches, train, steps)
            second = plain(before)
            if pair:  # the first one warms up
                measured["plain_s"].append(first)
                measured["again_s"].append(second)
                measured["tracked_s"].append(spent)
                measured["tracking_us"].append(tracking_us)
                measured["checkpoint_s"].append(checkpoint)
        for batch in batches:
            run.step_done(train(batch))
        if run.rank == 0:
            Path(run.spec.params["out"]).write_text(json.dumps(measured))


def _tracked(
    run: dlac.TrainingRun, batches: Iterator[Batch], train: Callable[[Batch], torch.Tensor], steps: int
) -> tuple[float, float, float]:
    """Return seconds per step, and of `step_done` mean microseconds without a checkpoint and seconds with one."""
    inside: list[float] = []
    started = time.perf_counter()
    for batch in batches:
        loss = train(batch)
        loss.item()
        before = time.perf_counter()
        run.step_done(loss)
        run.finish_step()
        inside.append(time.perf_counter() - before)
        if len(inside) == steps:
            break
    *without, with_checkpoint = inside
    spent = time.perf_counter() - started - with_checkpoint
    return spent / steps, 1e6 * sum(without) / len(without), with_checkpoint


if __name__ == "__main__":
    main()
