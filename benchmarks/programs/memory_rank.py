"""The rank of recovery_lab/memory_run.py: a replicated or sharded (FSDP2) model, whose steps rank 0 records.

A frozen table, which is not trained, makes its state larger.
"""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dlac_pipeline as dlac


def main() -> None:
    """Train until a signal ends it, or to the last step."""
    with dlac.training_run() as run:
        params = run.spec.params
        hidden, layers = int(params["hidden"]), int(params["layers"])
        # weights and a table that are loaded need no random values before
        linear = partial(torch.nn.utils.skip_init, torch.nn.Linear) if run.resume_point.step else torch.nn.Linear
        blocks = [linear(64, hidden), *(linear(hidden, hidden) for _ in range(layers))]
        model = torch.nn.Sequential(*blocks, linear(hidden, 1))
        if table_bytes := int(params.get("table_bytes", "0")):
            fill = torch.empty if run.resume_point.step else torch.rand
            model.register_buffer("table", fill(table_bytes // 4))
        sharded = params["sharded"] == "True"
        for layer in (*model, model) if sharded else ():
            fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.restore((dlac.DistributedState if sharded else dlac.TorchState)(model=model, optimizer=optimizer))
        stamps = Path(params["stamps"]).open("a")  # noqa: SIM115 - until the process ends
        for batch in run.batches():
            features = batch["x"].to(torch.float32)
            loss = batch.mean((model(features).squeeze(-1) - features.mean(-1)).square())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for parameter in () if sharded else model.parameters():
                dist.all_reduce(parameter.grad)
                assert parameter.grad is not None, "every parameter is used"
                parameter.grad /= run.world_size
            optimizer.step()
            done = time.time()
            run.step_done(loss)
            if os.environ["RANK"] == "0":
                print(os.getpid(), batch.step, done, time.time(), file=stamps, flush=True)


if __name__ == "__main__":
    main()
