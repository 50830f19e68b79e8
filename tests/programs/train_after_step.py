"""A model whose script works on after `run.step_done`, as many do: schedule, average of the weights, and evaluation.

Param `dies_at`: the first attempt dies at the begin of that step. Param `dies_copying`: so do the first attempts, one for each
of these steps, while the state in memory of the step is copied. The journal has the loss of each step and of each evaluation,
whose loader is shuffled by a seed that it draws.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import dlac_pipeline as dlac
from dlac_pipeline.checkpoint import step_gate
from dlac_pipeline.memory_states import save
from dlac_pipeline.memory_states.memory_file import MemoryFile


def evaluate(model: torch.nn.Module, held_out: TensorDataset) -> float:
    """Return a loss that depends on the order of the samples."""
    losses: list[float] = [
        model(x).mean().item() * weight for weight, (x,) in enumerate(DataLoader(held_out, shuffle=True))
    ]
    return sum(losses)


def die_copying(run: dlac.TrainingRun, step: int) -> None:
    """Copy each state beside training, slowly, and die in the midst of the state after a step."""
    save._LEAST_BESIDE_BYTES = step_gate._LEAST_BYTES = 1
    write = MemoryFile.write

    def write_slowly(file: MemoryFile, data: memoryview) -> int:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.01)
            if run.step == step and file._bytes > 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data)

    MemoryFile.write = write_slowly  # type: ignore[assignment, method-assign]  # as slow memory


def train(run: dlac.TrainingRun) -> None:
    """Train to the end of the order."""
    params = run.spec.params
    if deaths := params.get("dies_copying"):
        die_copying(run, [0, *map(int, deaths.split(",")), 0][run.resume_point.attempt])
    model = torch.nn.Sequential(torch.nn.Linear(4, 2048), torch.nn.Dropout(0.2), torch.nn.Linear(2048, 1))
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
