"""The rank of benchmarks/training.py and intervals.py: trains a transformer, and records the end of each step.

It records a step before it reports it. For intervals.py it takes the checkpoints itself, in every other block of steps.
"""

import json
import time
from pathlib import Path

import torch

import dlac_pipeline as dlac

_WARM_UP = 3
"""Steps before the first checkpoint."""


class Blocks:
    """Blocks without and with checkpoints, in turn. Those with them begin with one, and take more, `interval_s` apart.

    A block takes as long as its checkpoints, and the next one begins once the last of them is committed.
    """

    def __init__(self, run: dlac.TrainingRun) -> None:
        params = run.spec.params
        self._run = run
        self._interval_s, self._checkpoints = float(params["interval_s"]), int(params["checkpoints"])
        self._count = 2 * int(params["pairs"]) + 1
        self._taken, self._began = 0, 0.0
        self.ended: list[dict[str, float]] = []
        """Seconds of each block, the step before it, and its last step."""
        self._first = run.step

    def step_done(self) -> bool:
        """Take a checkpoint if one is due. Return True after the last block."""
        now, run = time.perf_counter(), self._run
        if not self._began:  # the first checkpoint allocates memory
            if run.step < _WARM_UP:
                return False
            run.checkpoint()
            self._begin()
            return False
        passed_s = now - self._began
        if passed_s >= self._checkpoints * self._interval_s:
            self.ended.append({"seconds": passed_s, "first": self._first, "last": run.step})
            self._begin()
        with_checkpoints = len(self.ended) % 2 == 1
        if with_checkpoints and time.perf_counter() - self._began >= self._taken * self._interval_s:
            run.checkpoint()
            self._taken += 1
        return len(self.ended) == self._count

    def _begin(self) -> None:
        self._run.settle()
        self._taken, self._began, self._first = 0, time.perf_counter(), self._run.step


def main() -> None:
    """Train to the end."""
    with dlac.training_run() as run:
        params = run.spec.params
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        device = torch.device("cpu") if accelerator is None else accelerator
        width, layers, tokens = int(params["width"]), int(params["layers"]), int(params["tokens"])
        layer = torch.nn.TransformerEncoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True)
        head = torch.nn.Linear(width, int(params["vocabulary"]))
        body = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        embedding = torch.nn.Embedding(int(params["vocabulary"]), width)
        model = torch.nn.Sequential(embedding, body, head).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        run.restore(dlac.TorchState(model=model, optimizer=optimizer))
        stamps: list[float] = []
        blocks = Blocks(run) if "pairs" in params else None
        positions = torch.arange(tokens, device=device)
        for batch in run.batches(device=device):
            rows = batch["row_id"][:, None] * 31 + positions
            logits = model(rows % int(params["vocabulary"]))
            loss = logits.float().logsumexp(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if accelerator is not None and batch.step % int(params["block"]) == 0:
                torch.accelerator.synchronize()  # otherwise a block would end when the host has launched it
            stamps.append(time.perf_counter())
            run.step_done(loss.detach())
            if batch.step == int(params["steps"]) if blocks is None else blocks.step_done():
                found = {"stamps_s": stamps, "parameters": sum(parameter.numel() for parameter in model.parameters())}
                Path(params["out"]).write_text(json.dumps({**found, "blocks": [] if blocks is None else blocks.ended}))
                break


if __name__ == "__main__":
    main()
