"""Plain PyTorch with DistributedDataParallel: `torchrun --rdzv-backend dlac --nproc-per-node 2 train_ddp.py`."""

import time

import torch
from torch.nn.parallel import DistributedDataParallel

import dlac_pipeline as dlac

with dlac.training_run("job.toml") as run:  # joins the process group
    network = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    model = DistributedDataParallel(network) if run.world_size > 1 else network
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run.restore(model=network, optimizer=optimizer)  # the last committed checkpoint, if one exists
    for batch in run.batches():
        loss = batch.mean((model(batch["x"][:, None])[:, 0] - batch["y"]) ** 2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.step_done(loss)  # records the rows of this step
        time.sleep(0.03)  # slow enough to be killed by hand
