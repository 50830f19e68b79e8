"""A rank that starts a child process, as data loaders and profilers do, and trains slowly."""

import subprocess
import time
from pathlib import Path

import torch

import dlac_pipeline as dlac

if __name__ == "__main__":
    with dlac.training_run() as run:
        child = subprocess.Popen(["sleep", "600"])
        (Path(run.spec.params["journal"]) / f"child-{run.rank}").write_text(str(child.pid))
        run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            time.sleep(0.2)
            run.step_done(batch["x"].sum())
