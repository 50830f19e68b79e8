"""A loop over Accelerate, with gradient accumulation: `torchrun --rdzv-backend dlac --nproc-per-node 2 train_accelerate.py`."""

import time

import torch
from accelerate import Accelerator

import dlac_pipeline as dlac
from dlac_pipeline.extensions.trainers.accelerate import accelerator_files

with dlac.training_run("job.toml") as run:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    network = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    model, optimizer, schedule = accelerator.prepare(network, optimizer, schedule)
    run.restore(accelerator_files(accelerator, model))  # load_state of the last committed checkpoint, if one exists
    total = torch.tensor(0.0)
    for batch in run.loader(micro_batches=2):
        with accelerator.accumulate(model):
            loss = batch.mean(
                (model(batch["x"][:, None])[:, 0] - batch["y"]) ** 2
            )  # also right if the batch is not full
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        total += loss.detach() / 2
        if accelerator.sync_gradients:  # the optimizer step is done
            run.step_done(total)  # a checkpoint that is due follows, which save_state writes
            total = torch.tensor(0.0)
            time.sleep(0.03)  # slow enough to be killed by hand
