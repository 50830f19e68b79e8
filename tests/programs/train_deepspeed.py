"""A small model with DeepSpeed. Params: the ZeRO `stage` (1), `dropout` (0.1), and `bf16`."""

import os
import time
from typing import Any

import deepspeed
import torch
import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path

import dlac_pipeline as dlac

CONFIG: dict[str, Any] = {
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
}


def main() -> None:
    """Train to the end of the order."""
    with dlac.training_run(os.environ.get("JOB_SPEC")) as run:  # set under other launchers than DLAC's
        params = run.spec.params
        dropout = float(params.get("dropout", "0.1"))
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(dropout), torch.nn.Linear(8, 1))
        config = {
            **CONFIG,
            "train_micro_batch_size_per_gpu": run.spec.order.batch_size // run.world_size,
            "zero_optimization": {"stage": int(params.get("stage", "1"))},
            "bf16": {"enabled": "bf16" in params},
        }
        engine, *_ = deepspeed.initialize(model=model, config=config)
        run.restore(engine)
        for batch in run.batches():
            features = batch["x"].to(torch.bfloat16 if "bf16" in params else torch.float32)
            loss = batch.mean((engine(features).squeeze(-1).float() - features.sum(-1).float()) ** 2)
            engine.backward(loss)
            engine.step()
            train_tiny.write_entry(run, batch, loss)
            time.sleep(float(params.get("pause_s", "0")))
            run.step_done(loss)


if __name__ == "__main__":
    main()
