"""Train and read on a fake accelerator: `train_on_fake_device.py train|read SPEC`. Prints its results as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import fake_device  # type: ignore[import-not-found]  # in this folder
import torch

import dlac_pipeline as dlac


def train(path: str) -> dict[str, Any]:
    """Train a model of the CPU with batches and losses of the device.

    Params: losses are NaN from step `nan_from` on, and the process ends after step `dies_at`.
    """
    model = torch.nn.Linear(4, 1)
    seen: dict[int, Any] = {}
    waited = []
    with dlac.training_run(path) as run:
        run.restore(dlac.TorchState(model=model))
        nan_from = int(run.spec.params.get("nan_from", "0"))
        for batch in run.batches(device="fake"):
            assert {batch["x"].device.type, batch.valid.device.type} == {"fake"}
            seen[batch.step] = batch["row_id"].cpu()[batch.valid.cpu()].tolist()
            loss = batch.mean(batch["x"].to(torch.float32).sum(-1))
            fake_device.LOG.clear()
            run.step_done(loss * float("nan") if 0 < nan_from <= batch.step else loss)
            waited.append("waited for a number" in fake_device.LOG)
            if batch.step == int(run.spec.params.get("dies_at", "0")):
                os._exit(1)
    return {"seen": seen, "waited": waited}


def read(path: str) -> dict[str, Any]:
    """Read a dataset's batches on the device, as batches and as the input of a model."""
    whole = [each["row_id"].tolist() for each in dlac.open_dataset(path).loader()]
    found = {}
    for workers in (0, 1):
        batches = list(dlac.open_dataset(path).loader(device="fake", num_workers=workers))
        assert {each["row_id"].device.type for each in batches} == {"fake"}
        found[f"workers {workers}"] = [each["row_id"].cpu().tolist() for each in batches] == whole
    inputs = dlac.open_dataset(path).loader(device="fake", inputs=lambda batch: {"x": [batch["row_id"]], "n": 1})
    made = [(each["x"][0].device.type, each["x"][0].cpu().tolist(), each["n"]) for each in inputs]
    found["inputs"] = made == [("fake", rows, 1) for rows in whole]
    pinned = next(iter(dlac.open_dataset(path).loader(pin_memory=True)))["row_id"]
    found["pinned"] = pinned.device.type == "cpu" and pinned.is_pinned()
    return {"same": found, "steps": len(whole)}


def main() -> None:
    """Run the requested program on the device."""
    fake_device.register()
    print(json.dumps({"train": train, "read": read}[sys.argv[1]](sys.argv[2])))


if __name__ == "__main__":
    main()
