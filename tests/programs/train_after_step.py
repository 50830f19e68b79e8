"""A model whose script works on after `run.step_done`, as many do: schedule, average of the weights, and evaluation.

Param `dies_at`: the first attempt dies at the begin of that step. The journal has the loss of each step and of each
evaluation, whose loader is shuffled by a seed that it draws.
"""

import json
import os
import signal
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import dlac_pipeline as dlac


def evaluate(model: torch.nn.Module, held_out: TensorDataset) -> float:
    """Return a loss that depends on the order of the samples."""
    losses: list[float] = [
        model(x).mean().item() * weight for weight, (x,) in enumerate(DataLoader(held_out, shuffle=True))
    ]
    return sum(losses)


def train(run: dlac.TrainingRun) -> None:
    """Train to the end of the order."""
    params = run.spec.params
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # type: ignore[no-untyped-call]  # so in torch
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    run.restore(model=model, average=average, optimizer=optimizer, schedule=schedule)
    held_out = TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
    evaluate(model, held_out)
    journal = Path(params["journal"]) / f"{run.spec.run}.jsonl"
    for batch in run.batches():
        if batch.step == int(params["dies_at"]) and run.resume_point.attempt == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        features = batch["x"].to(torch.float32)
        loss = batch.mean((model(features).squeeze(-1) - features.sum(-1)) ** 2)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        run.step_done(loss)
        schedule.step()
        average.update_parameters(model)
        entry = {"step": batch.step, "loss": loss.item(), "lr": schedule.get_last_lr()}
        if batch.step % 5 == 0:
            entry["evaluated"] = evaluate(average, held_out)
        with journal.open("a") as stream:
            stream.write(json.dumps(entry) + "\n")


def main() -> None:
    """Train the run of the launch folder."""
    with dlac.training_run() as run:
        train(run)


if __name__ == "__main__":
    main()
