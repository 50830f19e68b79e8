"""Trains in the first attempt of a run only. Later attempts raise an exception."""

import time

import torch

import dlac_pipeline as dlac

if __name__ == "__main__":
    with dlac.training_run() as run:
        model = torch.nn.Linear(4, 1)
        run.restore(dlac.TorchState(model=model))
        for batch in run.batches():
            if run.resume_point.attempt > 1:
                raise ValueError("the scratch disk is not empty")
            time.sleep(0.05)
            run.step_done(batch.mean(model(batch["x"].to(torch.float32)).squeeze(-1)))
