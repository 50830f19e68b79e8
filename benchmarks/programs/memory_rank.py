"""The rank of recovery_lab/memory_run.py: a replicated or sharded (FSDP2) model, whose steps rank 0 records.

A frozen table, which is not trained, makes its state larger.
"""

import os
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import dlac_pipeline as dlac

_PIECE_BYTES = 250 * 10**6
"""Size of a piece of the table. A rank has one of them whole at the most, if the model is sharded."""


class Model(torch.nn.Module):
    """Layers, and a frozen table of so many bytes, which no step uses."""

    def __init__(self, layers: Iterable[torch.nn.Module], table_bytes: int, *, is_loaded: bool, sharded: bool) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(*layers)
        self.frozen = torch.nn.ModuleList()
        fill = torch.empty if is_loaded else torch.rand
        for begin in range(0, table_bytes, _PIECE_BYTES):
            piece = torch.nn.Module()
            size = min(_PIECE_BYTES, table_bytes - begin) // 4
            piece.table = torch.nn.Parameter(fill(size), requires_grad=False)
            if sharded:
                fully_shard(piece)
            self.frozen.append(piece)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return an output for each row."""
        output: torch.Tensor = self.layers(features).squeeze(-1)
        return output


def main() -> None:
    """Train until a signal ends it, or to the last step."""
    with dlac.training_run() as run:
        params = run.spec.params
        hidden, layers = int(params["hidden"]), int(params["layers"])
        # weights and a table that are loaded need no random values before
        is_loaded = run.resume_point.step > 0
        linear = partial(torch.nn.utils.skip_init, torch.nn.Linear) if is_loaded else torch.nn.Linear
        blocks = [linear(64, hidden), *(linear(hidden, hidden) for _ in range(layers))]
        sharded, table_bytes = params["sharded"] == "True", int(params.get("table_bytes", "0"))
        model = Model([*blocks, linear(hidden, 1)], table_bytes, is_loaded=is_loaded, sharded=sharded)
        device = torch.accelerator.current_accelerator() if params.get("on_accelerator") == "True" else None
        if device is not None:
            torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        model.to(device)
        for part in (*model.layers, model) if sharded else ():
            if any(True for _ in part.parameters()):
                fully_shard(part)
        optimizer = torch.optim.AdamW(model.layers.parameters(), lr=1e-4, fused=True)
        run.restore((dlac.DistributedState if sharded else dlac.TorchState)(model=model, optimizer=optimizer))
        stamps = Path(params["stamps"]).open("a")  # noqa: SIM115 - until the process ends
        for batch in run.batches(device=device):
            features = batch["x"].to(torch.float32)
            loss = batch.mean((model(features) - features.mean(-1)).square())
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            for parameter in () if sharded or run.world_size == 1 else model.layers.parameters():
                dist.all_reduce(parameter.grad)
                assert parameter.grad is not None, "every parameter is used"
                parameter.grad /= run.world_size
            optimizer.step()
            done = time.time()
            run.step_done(loss)
            if os.environ["RANK"] == "0":
                print(os.getpid(), batch.step, done, file=stamps, flush=True)


if __name__ == "__main__":
    main()
