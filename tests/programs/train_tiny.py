"""A tiny model trained on a table of (row_id, x): plain PyTorch, gradients averaged by hand, and its own journal.

Params make it fail: `dies_at` a step, `deadly_row` causes SIGSEGV in its batch, `deadlock_at` a step,
`holds_loading` and `holds_training` are attempts that load, or train their first step, without end. `slow_rank` is slow
by `slow_s` seconds in each forward pass, `nan_from` a step makes losses NaN. `skips` are steps that are not applied. A layer of
`hidden` units has buffers that differ by rank.
$NOISE_SEED adds noise to the loss that no saved generator knows, and with $OWN_GROUP the script makes the process group.

The journal has the row ids in the tensors of each finished step, as evidence that is independent of DLAC.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dlac_pipeline as dlac


def write_entry(run: dlac.TrainingRun, batch: dlac.Batch, loss: torch.Tensor, rows: list[Any] | None = None) -> None:
    """Append a finished step with its row ids, or these rows, to this rank's journal. A rehearsal writes none."""
    if "DLAC_REHEARSAL" in os.environ:
        return
    point = run.resume_point
    entry = {
        **{"run": run.spec.run, "attempt": point.attempt, "step": batch.step, "rank": run.rank},
        "reader": run.coordinate.index,
        **{"rows": batch["row_id"][batch.valid].tolist() if rows is None else rows, "loss": loss.item()},
    }
    path = Path(run.spec.params["journal"]) / f"{run.spec.run}-{point.nonce}-{run.rank}.jsonl"
    with path.open("a") as stream:
        stream.write(json.dumps(entry) + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def hold(run: dlac.TrainingRun, phase: str) -> None:
    """Stay in a phase until the rank is killed, in the attempts that are to."""
    params, attempt = run.spec.params, str(run.resume_point.attempt)
    if attempt in params.get(f"holds_{phase}", "").split(","):
        (Path(params["journal"]) / f"{run.spec.run}-{phase}-{attempt}-{run.rank}").touch()
        time.sleep(600)


def train(run: dlac.TrainingRun) -> None:
    """Train to the end of the order."""
    params = run.spec.params
    hidden = int(params.get("hidden", "0"))
    model: torch.nn.Module = torch.nn.Linear(4, int(params.get("outputs", "1")))
    if hidden:
        model = torch.nn.Sequential(
            torch.nn.Linear(4, hidden), torch.nn.BatchNorm1d(hidden), torch.nn.Linear(hidden, 1)
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    hooked: Any = model  # torch leaves the method untyped
    if "holds_loading" in params:  # with a hook, tensors are loaded in another way
        hooked.register_load_state_dict_pre_hook(lambda *_: hold(run, "loading"))
    run.restore(dlac.TorchState(model=model, optimizer=optimizer))
    noise = float(params.get("noise", "0.01"))
    for batch in run.batches():
        hold(run, "training")
        if batch.step == int(params.get("dies_at", "0")):
            os._exit(1)
        if int(params.get("deadly_row", "-1")) in batch["row_id"][batch.valid].tolist():
            os.kill(os.getpid(), signal.SIGSEGV)
        if run.rank == int(params.get("slow_rank", "-1")):
            time.sleep(float(params["slow_s"]))
        if batch.step == int(params.get("deadlock_at", "0")) and run.resume_point.attempt == 1 and run.rank == 1:
            dist.recv(torch.zeros(1), src=0)  # rank 0 waits for this rank's gradients
        features = batch["x"].to(torch.float32)
        residual = model(features).squeeze(-1) - features.sum(-1)
        loss = batch.mean(residual**2 + noise * torch.rand(len(features)))
        if 0 < int(params.get("nan_from", "0")) <= batch.step:
            loss = loss * float("nan")
        if "NOISE_SEED" in os.environ:
            generator = torch.Generator().manual_seed(int(os.environ["NOISE_SEED"]) + batch.step)
            loss = loss + torch.rand((), generator=generator)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if run.world_size > 1:
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                assert parameter.grad is not None
                parameter.grad /= run.world_size
        time.sleep(float(params.get("pause_s", "0")))
        applied = str(batch.step) not in params.get("skips", "").split(",")
        if applied:
            optimizer.step()
        write_entry(run, batch, loss)
        run.step_done(loss, applied=applied)


def main() -> None:
    """Train the run of the launch folder, or of $JOB_SPEC under other launchers than DLAC's."""
    if "OWN_GROUP" in os.environ:
        dist.init_process_group("gloo")
    with dlac.training_run(os.environ.get("JOB_SPEC")) as run:
        train(run)


if __name__ == "__main__":
    main()
