"""The rank of benchmarks/listeners.py: it trains a small transformer, and writes the seconds of each step."""

import itertools
import json
import time
from pathlib import Path

import torch

import dlac_pipeline as dlac
from benchmarks.programs.overhead_rank import Model


def main() -> None:
    """Train to the end of the table."""
    torch.set_num_threads(1)
    with dlac.training_run() as run:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        moments = [time.perf_counter()]
        for batch in run.batches():
            loss = batch.mean(model(batch["tokens"].long()))
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            run.step_done(loss)
            moments.append(time.perf_counter())
        steps = [after - before for before, after in itertools.pairwise(moments)]
        Path(run.spec.params["out"]).write_text(json.dumps(steps))


if __name__ == "__main__":
    main()
