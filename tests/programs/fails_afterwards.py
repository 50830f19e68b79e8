"""Finishes the run, then fails. An error of the script after the last batch must not be hidden."""

import torch

import dlac_pipeline as dlac

if __name__ == "__main__":
    with dlac.training_run() as run:
        run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            run.step_done(batch["x"].sum())
    raise RuntimeError("exporting the model failed")
