"""A rank of DLRover, for benchmarks/memory_recovery.py: the training of memory_rank.py, with DLRover's checkpoints and sampler.

`dlrover_rank.py SETTINGS`: a JSON file. The model is saved in memory each `memory_steps`, and in `checkpoints` each `disk_steps`.
Each rank writes its process, step, loss and rows to `journal-RANK` before the step. Rank 0 stamps finished steps.
"""

import copy
import json
import os
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from dlrover.trainer.torch.elastic.dataloader import ElasticDataLoader  # type: ignore[import-not-found]  # in another environment
from dlrover.trainer.torch.elastic.sampler import ElasticDistributedSampler  # type: ignore[import-not-found]
from dlrover.trainer.torch.flash_checkpoint.ddp import (  # type: ignore[import-not-found]
    DdpCheckpointer,
    StorageType,
)
from torch.utils.data import TensorDataset


def main() -> None:
    """Train until a signal ends it, or to the last step."""
    settings = json.loads(Path(sys.argv[1]).read_text())
    hidden, layers, folder = settings["hidden"], settings["layers"], Path(settings["folder"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    checkpointer = DdpCheckpointer(str(folder / "checkpoints"))
    # what is loaded is shared memory, into which AdamW would write on a CPU
    saved = copy.deepcopy(checkpointer.load_checkpoint())
    torch.manual_seed(0)
    linear = partial(torch.nn.utils.skip_init, torch.nn.Linear) if saved else torch.nn.Linear
    blocks = [linear(64, hidden), *(linear(hidden, hidden) for _ in range(layers))]
    model = torch.nn.Sequential(*blocks, linear(hidden, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    x = torch.load(settings["rows"])
    rows = TensorDataset(torch.arange(len(x)), x)
    sampler = ElasticDistributedSampler(rows)
    loader = ElasticDataLoader(rows, batch_size=settings["batch"] // world_size, sampler=sampler)
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        sampler.load_state_dict(saved["sampler"])
    step = saved.get("step", 0)
    journal = (folder / f"journal-{rank}").open("a")
    stamps = (folder / "stamps").open("a")
    for epoch in range(sampler.epoch, 1_000):
        sampler.set_epoch(epoch)
        for row_ids, features in loader:
            step += 1
            loss = (model(features).squeeze(-1) - features.mean(-1)).square().mean()
            print(os.getpid(), step, loss.item().hex(), *row_ids.tolist(), file=journal, flush=True)
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                assert parameter.grad is not None, "every parameter is used"
                parameter.grad /= world_size
            optimizer.step()
            done = time.time()
            if step % settings["memory_steps"] == 0:
                state = {
                    "step": step,
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "sampler": sampler.state_dict(step, loader.batch_size),
                }
                checkpointer.save_checkpoint(step, state, storage_type=StorageType.MEMORY)
                if step % settings["disk_steps"] == 0:
                    checkpointer.save_checkpoint(step, state, storage_type=StorageType.DISK)
            if rank == 0:
                print(os.getpid(), step, done, file=stamps, flush=True)
            if step == settings["steps"]:
                return


if __name__ == "__main__":
    main()
