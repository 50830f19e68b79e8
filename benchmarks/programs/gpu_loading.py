"""Steps of a GPT with batches of the reader, on alternating sides. Argument: JSON of home, model, segment_s and pairs.

A side reads alone: each segment opens its reader at the end of the side's last one, and its first steps do not count.

- plain: batches in pageable memory, and `.to(device)`, for which the host waits.
- copied: `loader(device=...)`: page-locked memory and a separate stream.
- held: one batch on the device, repeatedly.
"""

import json
import sys
import time
from collections.abc import Generator, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from dlac_pipeline import open_dataset
from dlac_pipeline.lakehouse.config import LakehouseConfig

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "gpt"))
from model import Gpt, GptConfig  # type: ignore[import-not-found]  # on the path since the line before

SIDES = ("plain", "copied", "held", "plain again")
_UNCOUNTED = 3
"""First steps of a segment: the reader starts, and the host gets ahead of the device."""


class Trainer:
    """A model that trains on the device of this node."""

    def __init__(self, size: dict[str, int]) -> None:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self.device = torch.device("cpu") if accelerator is None else accelerator
        self._mixed = accelerator is not None
        config = GptConfig(
            vocab_size=size["vocab_size"],
            sequence_length=size["length"],
            d_model=size["d_model"],
            layers=size["layers"],
            heads=size["heads"],
        )
        torch.manual_seed(0)
        self.model = Gpt(config).to(self.device)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def gradients(self, tokens: torch.Tensor) -> None:
        """Compute the gradients of a batch, in bfloat16 on an accelerator."""
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self._mixed):
            loss = self.model(tokens).mean()
        self._optimizer.zero_grad()
        loss.backward()

    def step(self, tokens: torch.Tensor) -> None:
        """Train on a batch."""
        self.gradients(tokens)
        self._optimizer.step()

    def wait(self) -> None:
        """Wait until everything is computed."""
        if self._mixed:
            torch.accelerator.synchronize()


class Reading:
    """The datasets of all sides over one table."""

    def __init__(self, home: Path, batch: int, device: torch.device) -> None:
        self._settings: dict[str, Any] = {
            "table": "src.tokens",
            "columns": ["tokens"],
            "batch_size": batch,
            "passes": 100_000,
        }
        self._lakehouse = LakehouseConfig().at_home(home)
        self._device = device
        self._states: dict[str, Any] = {}

    def batches(self, side: str) -> Generator[torch.Tensor, None, None]:
        """Yield tokens on the device, from the end of the side's last segment."""
        dataset = open_dataset(lakehouse=self._lakehouse, state=self._states.get(side), **self._settings)
        if side == "held":
            tokens = next(iter(dataset))["tokens"].to(self._device)
            while True:
                yield tokens
        for batch in dataset.loader(device=self._device if side == "copied" else None):
            self._states[side] = dataset.state_dict()
            yield batch["tokens"] if side == "copied" else batch["tokens"].to(self._device)


def count_differing(reading: Reading, steps: int) -> int:
    """Return how many of the first batches differ in any bit."""
    pairs = zip(islice(reading.batches("plain"), steps), islice(reading.batches("copied"), steps), strict=True)
    return sum(not torch.equal(plain.cpu(), copied.cpu()) for plain, copied in pairs)


def measure_segment(trainer: Trainer, batches: Iterator[torch.Tensor], steps: int) -> dict[str, float]:
    """Return seconds of the steps, and seconds of the host's wait for batches."""
    for tokens in islice(batches, _UNCOUNTED):
        trainer.step(tokens)
    trainer.wait()
    began, waited = time.perf_counter(), 0.0
    for _ in range(steps):
        asked = time.perf_counter()
        tokens = next(batches)
        waited += time.perf_counter() - asked
        trainer.step(tokens)
    trainer.wait()
    return {"seconds": time.perf_counter() - began, "waited_s": waited}


def measure_sides(asked: dict[str, Any]) -> dict[str, Any]:
    """Return the segments of each side."""
    trainer = Trainer(asked["model"])
    reading = Reading(Path(asked["home"]), asked["model"]["batch"], trainer.device)
    differing = count_differing(reading, 5)
    held = reading.batches("held")
    tried = measure_segment(trainer, held, 5)
    steps = max(5, round(asked["segment_s"] * 5 / tried["seconds"]))
    held.close()
    segments: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(asked["pairs"]):
        for side in SIDES if number % 2 else reversed(SIDES):
            batches = reading.batches(side)
            segments[side].append(measure_segment(trainer, batches, steps))
            batches.close()
    parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
    return {"steps": steps, "segments": segments, "differing": differing, "parameters": parameters}


if __name__ == "__main__":
    print(json.dumps(measure_sides(json.loads(sys.argv[1]))))
