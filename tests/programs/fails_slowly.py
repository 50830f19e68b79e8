"""Rank 1 fails in its second step and exits slowly. Rank 0, whose connection broke, exits long before it."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import dlac_pipeline as dlac


@contextmanager
def exit_slowly(rank: int) -> Iterator[None]:
    """Exit slowly, as with a large heap or on a busy node."""
    try:
        yield
    finally:
        time.sleep(3.0 * rank)


if __name__ == "__main__":
    with exit_slowly(rank=int(os.environ["RANK"])), dlac.training_run() as run:
        run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            if run.rank == 1 and batch.step == 2:
                raise ValueError("the label of this row is no number")
            run.step_done(batch.mean(batch["x"].sum(1)))
