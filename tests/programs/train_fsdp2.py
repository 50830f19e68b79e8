"""A small model with FSDP2, whose shards are saved through torch.distributed.checkpoint. Params: `dropout` (0.1), `frozen_mb`."""

import time

import torch
import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path
from torch.distributed.fsdp import fully_shard

import dlac_pipeline as dlac


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        params = run.spec.params
        dropout = float(params.get("dropout", "0.1"))
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        if "frozen_mb" in params:
            table = torch.zeros(int(params["frozen_mb"]), 512, 512)
            model[1].table = torch.nn.Parameter(table, requires_grad=False)
        for layer in (model[0], model[2], model):
            fully_shard(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
        run.restore(dlac.DistributedState(model=model, optimizer=optimizer, scheduler=scheduler))
        for batch in run.batches():
            features = batch["x"].to(torch.float32)
            loss = batch.mean((model(features).squeeze(-1) - features.sum(-1)) ** 2)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            optimizer.step()
            scheduler.step()
            train_tiny.write_entry(run, batch, loss)
            time.sleep(float(params.get("pause_s", "0")))
            run.step_done(loss)


if __name__ == "__main__":
    main()
