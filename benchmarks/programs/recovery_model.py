"""The small model with DeepSpeed's ZeRO 1 that both sides of benchmarks/recovery.py train, and the stamps of its steps."""

import os
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
from recovery_sizes import BATCH, WIDTH  # type: ignore[import-not-found]  # this folder is on the path

_HIDDEN = 1024


def make_engine(world_size: int) -> Any:
    """Return an engine of about 1.1 million parameters."""
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, _HIDDEN), torch.nn.GELU(), torch.nn.Linear(_HIDDEN, _HIDDEN), torch.nn.Linear(_HIDDEN, 1)
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH // world_size,
        "gradient_accumulation_steps": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    return engine


def train_step(engine: Any, features: torch.Tensor) -> torch.Tensor:
    """Train one optimizer step."""
    loss: torch.Tensor = (engine(features).squeeze(-1) - features.mean(-1)).square().mean()
    engine.backward(loss)
    engine.step()
    return loss


def stamp(path: str, step: int) -> None:
    """Record on rank 0 the time at which a step was finished."""
    if os.environ["RANK"] == "0":
        with Path(path).open("a") as stream:
            stream.write(f"{os.getpid()} {step} {time.time()}\n")
