"""train_tiny's model under DeepSpeed (ZeRO 1)."""

import os
import time
from typing import Any

import deepspeed
import torch
import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path

import dlac_pipeline as dlac

CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_accumulation_steps": 1,
    "zero_optimization": {"stage": 1},
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run(os.environ.get("JOB_SPEC")) as run:  # named under other launchers than DLAC's
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))
        engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
        run.restore(engine)
        for batch in run.batches():
            features = batch["x"].to(torch.float32)
            loss = batch.mean((engine(features).squeeze(-1) - features.sum(-1)) ** 2)
            engine.backward(loss)
            engine.step()
            train_tiny.write_entry(run, batch, loss)
            time.sleep(float(run.spec.params.get("pause_s", "0")))
            run.step_done(loss)


if __name__ == "__main__":
    main()
