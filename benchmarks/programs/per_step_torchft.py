"""A replica group of torchft alone, for benchmarks/per_step.py: its example `train_ddp.py`, with one of two loaders.

Arguments: number of the group, groups, loader ("stateful" or "sampler"), address of the lighthouse, file of rows, folders of the
journal and of checkpoints, steps. The state of a StatefulDataLoader is saved after each of its group's checkpoints. Gradients are
averaged by `Manager.allreduce`: torchft 0.2.0's own wrapper of DistributedDataParallel fails on a dead peer. PER_STEP_ADDRESS is
the address of this node, by default loopback.
"""

import os
import socket
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from per_step_model import FORWARD_S, losses, make  # type: ignore[import-not-found]  # the script's folder is on the path
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # published without types

from benchmarks.per_step_lab.journal import GroupJournal

_LIMIT = timedelta(seconds=30)
_CHECKPOINT_STEPS = 20
_ADDRESS = os.environ.get("PER_STEP_ADDRESS", "127.0.0.1")


class Loader:
    """Batches of one group without an end, in one of two ways."""

    def __init__(self, kind: str, rows: TensorDataset, *, group: int, groups: int, batch: int, folder: Path) -> None:
        self._sampler = torchft.DistributedSampler(
            rows, replica_rank=group, num_replica_groups=groups, group_rank=0, num_replicas=1, shuffle=True, seed=3
        )
        self._is_stateful = kind == "stateful"
        self._file = folder / f"loader-{group}.pt"
        make_loader: Any = StatefulDataLoader if self._is_stateful else DataLoader
        self._loader = make_loader(rows, batch_size=batch, sampler=self._sampler)
        if self._is_stateful and self._file.exists():
            self._loader.load_state_dict(torch.load(self._file, weights_only=False))

    def batches(self) -> Iterator[list[torch.Tensor]]:
        """Yield batches, epoch after epoch."""
        for epoch in range(1_000_000):
            self._sampler.set_epoch(epoch)
            yield from self._loader

    def save(self) -> None:
        """Save the position of a stateful loader."""
        if self._is_stateful:
            part = self._file.with_suffix(".part")
            torch.save(self._loader.state_dict(), part)
            part.rename(self._file)


def main() -> None:
    """Train until a step is committed."""
    group, groups, kind, lighthouse, rows_file, journal_folder, folder, steps = sys.argv[1:]
    journal = GroupJournal(journal_folder, int(group))
    rows = torch.load(rows_file)
    loader = Loader(
        kind,
        TensorDataset(rows["row_id"], rows["x"]),
        group=int(group),
        groups=int(groups),
        batch=rows["batch_size"] // int(groups),
        folder=Path(folder),
    )
    model, optimizer = make()

    def load(state: dict[str, Any]) -> None:
        journal.reaches("healing")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    # torchft's server of states has the address of this name, and a namespace's name has none
    socket.gethostname = lambda: _ADDRESS
    store = TCPStore(_ADDRESS, 0, is_master=True, wait_for_workers=False)
    manager: Any = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_LIMIT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=_LIMIT,
        quorum_timeout=_LIMIT,
        rank=0,
        world_size=1,
        store_addr=_ADDRESS,
        store_port=store.port,
        lighthouse_addr=lighthouse,
        replica_id=f"group-{group}",
        hostname=_ADDRESS,
        heartbeat_interval=timedelta(milliseconds=50),
        init_sync=False,
    )
    allreduce = journal.die_in_second_call(manager.allreduce, "all_reduce", per=manager.current_step)
    for row_ids, x in loader.batches():
        manager.start_quorum()
        optimizer.zero_grad()
        loss = losses(model, x).mean()
        time.sleep(FORWARD_S)
        journal.reaches("forward")
        loss.backward()
        step = manager.current_step() + 1
        journal.write("share", step=step, rows=row_ids.tolist())
        works = [allreduce(parameter.grad) for parameter in model.parameters()]
        for work in works:
            work.wait()
        took_part = manager.is_participating()
        committed = manager.should_commit()
        journal.reaches("should_commit")
        if committed:
            optimizer.step()
            step = manager.current_step()
            journal.write("committed", step=step, rows=row_ids.tolist() if took_part else [])
            if step % _CHECKPOINT_STEPS == 0:
                torch.save(model.state_dict(), Path(folder) / f"model-{group}.pt")
                journal.reaches("checkpoint")
                loader.save()
        if manager.current_step() >= int(steps):
            os._exit(0)


if __name__ == "__main__":
    main()
