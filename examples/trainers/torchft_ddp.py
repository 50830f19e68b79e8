"""Replica groups on torchft: `dlac train replicas.toml`. Kill a rank with SIGKILL, and the others train on."""

import time

import torch

import dlac_pipeline as dlac

with dlac.training_run("replicas.toml") as run:
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = dlac.TorchFTState(model=model, optimizer=optimizer)
    run.restore(state)  # the last committed checkpoint, or later the state of a peer
    for batch in run.batches():  # this group's share of each global batch
        loss = batch.mean((model(batch["x"][:, None])[:, 0] - batch["y"]) ** 2)
        optimizer.zero_grad()
        loss.backward()
        if state.reduce(loss):  # averages the gradients over the groups present
            optimizer.step()
        run.step_done(loss)  # a step that did not commit is read again
        time.sleep(0.03)  # slow enough to be killed by hand
