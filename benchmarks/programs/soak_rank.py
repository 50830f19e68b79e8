"""The rank of benchmarks/soak.py: a tiny model, gradients averaged by hand, and a journal independent of DLAC.

The journal has a line per finished step: attempt, step, rank, the row ids in the tensors, and the time. A rehearsal
writes none.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

import dlac_pipeline as dlac


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        params = run.spec.params
        point = run.resume_point
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        path = Path(params["journal"]) / f"{run.spec.run}-{point.nonce}-{run.rank}.jsonl"
        if "DLAC_REHEARSAL" in os.environ:
            path = Path(os.devnull)
        with path.open("a") as journal:
            for batch in run.batches():
                loss = _step(run, model, optimizer, batch)
                time.sleep(float(params["pause_s"]))
                rows = batch["row_id"][batch.valid].tolist()
                entry = {"attempt": point.attempt, "step": batch.step, "rank": run.rank, "rows": rows}
                journal.write(json.dumps({**entry, "at": time.time()}) + "\n")
                journal.flush()
                run.step_done(loss)


def _step(
    run: dlac.TrainingRun, model: torch.nn.Linear, optimizer: torch.optim.AdamW, batch: dlac.Batch
) -> torch.Tensor:
    """Train one optimizer step. Noise in the loss shows whether generators are restored."""
    features = batch["x"].to(torch.float32)
    residual = model(features).squeeze(-1) - features.sum(-1)
    loss: torch.Tensor = batch.mean(residual**2 + 0.01 * torch.rand(len(features)))
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    if run.world_size > 1:
        for parameter in model.parameters():
            assert parameter.grad is not None
            dist.all_reduce(parameter.grad)
            parameter.grad /= run.world_size
    optimizer.step()
    return loss


if __name__ == "__main__":
    main()
