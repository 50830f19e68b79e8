"""The rank of the adapters in benchmarks/checkpoint.py: a frozen layer with a trained adapter of low rank (LoRA)."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import async_save

import dlac_pipeline as dlac

_RANK = 64


class Adapted(nn.Module):
    """A frozen layer of `width` x `width`, and an adapter beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.adapter = nn.Sequential(nn.Linear(width, _RANK, bias=False), nn.Linear(_RANK, width, bias=False))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Return the layer's output with the adapter's."""
        result: torch.Tensor = self.base(values) + self.adapter(values)
        return result


def main() -> None:
    """Train the adapter, save its state once with `async_save`, and write the sizes to a file."""
    with dlac.training_run() as run:
        params = run.spec.params
        model = Adapted(int(params["width"]))
        optimizer = torch.optim.AdamW(model.adapter.parameters(), lr=1e-4)
        run.restore(model=model, optimizer=optimizer)
        for batch in run.batches():
            optimizer.zero_grad()
            model(torch.rand(1, model.base.in_features)).square().mean().backward()
            optimizer.step()
            run.step_done(float(batch.step))
        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{params['out']}.store", rank=0, world_size=1)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        folder = Path(f"{params['out']}.dcp")
        async_save(state, checkpoint_id=str(folder)).result()  # type: ignore[union-attr]  # no stager of its own
        moments = [value for each in optimizer.state.values() for value in each.values()]
        sizes = {
            "base": model.base.weight.nbytes,
            "adapter": sum(each.nbytes for each in [*model.adapter.parameters(), *moments]),
            "dcp": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        }
        Path(params["out"]).write_text(json.dumps(sizes))


if __name__ == "__main__":
    main()
