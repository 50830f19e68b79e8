"""The rank of benchmarks/soak.py: a tiny model, gradients averaged by hand, and a journal independent of DLAC.

The journal has a line per step: attempt, step, rank, number of ranks, the row ids in the tensors, the time, and whether the step
is done. A replica group writes one more line once a step is done. A rehearsal writes none.
"""

import json
import os
import time
from pathlib import Path
from typing import TextIO

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
        is_group = run.spec.launch.replicas > 0
        state = (dlac.TorchFTState if is_group else dlac.TorchState)(model=model, optimizer=optimizer)
        run.restore(state)
        path = Path(params["journal"]) / f"{run.spec.run}-{point.nonce}-{run.rank}.jsonl"
        if "DLAC_REHEARSAL" in os.environ:
            path = Path(os.devnull)
        with path.open("a") as journal:
            for batch in run.batches():
                loss = _loss(model, batch, noise=float(params["noise"]))
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
                time.sleep(float(params["pause_s"]))
                rows = batch["row_id"][batch.valid].tolist()
                name = {"attempt": point.attempt, "step": batch.step, "rank": run.rank, "ranks": batch.readers}
                if isinstance(state, dlac.TorchFTState):
                    _write(journal, **name, rows=rows, done=False)
                    done = state.reduce(loss)
                else:
                    _average_gradients(run, model)
                    done = True
                if done:
                    optimizer.step()
                    _write(journal, **name, **({} if is_group else {"rows": rows}), done=True)
                run.step_done(loss)


def _write(journal: TextIO, **facts: object) -> None:
    journal.write(json.dumps({**facts, "at": time.time()}) + "\n")
    journal.flush()


def _loss(model: torch.nn.Linear, batch: dlac.Batch, *, noise: float) -> torch.Tensor:
    """Return the loss of a batch. Noise in it shows whether generators are restored."""
    features = batch["x"].to(torch.float32)
    target = features.sum(-1) + torch.sin(7.0 * batch["row_id"])  # no model predicts it, so the loss does not vanish
    residual = model(features).squeeze(-1) - target
    loss: torch.Tensor = batch.mean(residual**2 + noise * torch.rand(len(features)))
    return loss


def _average_gradients(run: dlac.TrainingRun, model: torch.nn.Linear) -> None:
    for parameter in model.parameters() if run.world_size > 1 else ():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= run.world_size


if __name__ == "__main__":
    main()
