"""Fit a line in plain PyTorch; each point is consumed exactly once, even if this process is killed."""

import time

import torch

import dlac_pipeline as dlac

with dlac.training_run() as run:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    run.restore(dlac.TorchState(model=model, optimizer=optimizer))  # the last committed checkpoint, if one exists
    for batch in run.batches():  # one batch per optimizer step, past the last committed row
        loss = batch.mean((model(batch["x"][:, None])[:, 0] - batch["y"]) ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step_done(loss)  # records the rows of this step, and commits a checkpoint when one is due
        time.sleep(0.05)  # slow enough to be killed by hand
