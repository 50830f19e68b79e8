"""A tiny model trained on packed documents, whose tokens are their rows' numbers, with a journal of every sequence."""

import time
from typing import Any

import torch
import torch.distributed as dist
import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path

import dlac_pipeline as dlac


def sequences_of(batch: dlac.Batch) -> list[Any]:
    """Return each sequence of a batch as its tokens without padding."""
    tokens = [row[mask].tolist() for row, mask in zip(batch["tokens"], batch["document"] > 0, strict=True)]
    return [sequence for sequence, valid in zip(tokens, batch.valid.tolist(), strict=True) if valid]


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run() as run:
        model = torch.nn.Embedding(4096, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        for batch in run.batches():
            loss = batch.token_mean((model(batch["tokens"] % 4096) ** 2).mean(-1))
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            if run.world_size > 1:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    assert parameter.grad is not None
                    parameter.grad /= run.world_size
            optimizer.step()
            time.sleep(float(run.spec.params.get("pause_s", "0")))
            train_tiny.write_entry(run, batch, loss, sequences_of(batch))
            run.step_done(loss)


if __name__ == "__main__":
    main()
