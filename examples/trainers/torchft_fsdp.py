"""Replica groups of two ranks on torchft and FSDP2: `dlac train sharded_replicas.toml`. A dead rank ends its group only."""

import time

import torch
from torch.distributed.fsdp import fully_shard

import dlac_pipeline as dlac

with dlac.training_run("sharded_replicas.toml") as run:  # joins the process group of this replica group
    model = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    for layer in (model[0], model[2], model):
        fully_shard(layer)  # over the ranks of the group
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state = dlac.TorchFTState(model=model, optimizer=optimizer)
    run.restore(state)  # the last committed checkpoint, or later the state of a peer
    for batch in run.batches():  # this rank's share of each global batch
        loss = batch.mean((model(batch["x"][:, None])[:, 0] - batch["y"]) ** 2)
        optimizer.zero_grad()
        loss.backward()  # averages the gradients over the ranks of the group
        if state.reduce(loss):  # averages this rank's shards of them over the groups present
            optimizer.step()
        run.step_done(loss)  # a step that did not commit is read again
        time.sleep(0.03)  # slow enough to be killed by hand
