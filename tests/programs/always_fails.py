"""A training script with a bug that every attempt meets at the same step, before the first checkpoint."""

import torch

import dlac_pipeline as dlac

if __name__ == "__main__":
    with dlac.training_run() as run:
        run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            raise ZeroDivisionError(f"no way past step {batch.step}")
