"""Train on a fake accelerator: `train_on_fake_device.py SPEC`. Prints its results as JSON."""

import json
import os
import sys
from typing import Any

import fake_device  # type: ignore[import-not-found]  # in this folder
import torch

import dlac_pipeline as dlac


def train(path: str) -> dict[str, Any]:
    """Train a model of the CPU with batches and losses of the device, up to the step in param `dies_at`."""
    model = torch.nn.Linear(4, 1)
    seen: dict[int, Any] = {}
    waited = []
    with dlac.training_run(path) as run:
        run.restore(dlac.TorchState(model=model))
        for batch in run.batches(device="fake"):
            assert {batch["x"].device.type, batch.valid.device.type} == {"fake"}
            seen[batch.step] = batch["row_id"].cpu()[batch.valid.cpu()].tolist()
            loss = batch.mean(batch["x"].to(torch.float32).sum(-1))
            fake_device.LOG.clear()
            run.step_done(loss)
            waited.append("waited for a number" in fake_device.LOG)
            if batch.step == int(run.spec.params.get("dies_at", "0")):
                os._exit(1)
    return {"seen": seen, "waited": waited}


def main() -> None:
    """Train on the device."""
    fake_device.register()
    print(json.dumps(train(sys.argv[1])))


if __name__ == "__main__":
    main()
