"""The GPT of examples/mesh, with a journal.

With `--dropout` blocks drop features and are computed again backward. With `--own-mesh` a script under torchrun has its own mesh.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import train_tiny  # type: ignore[import-not-found]  # the rank puts this folder on the path
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import dlac_pipeline as dlac

sys.path.insert(0, str(Path(__file__).parents[2]))
from examples.mesh import train


class DroppingBlock(train.Block):
    """A block that drops features, and is computed again in the backward pass."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Features [samples, T, width] to features of the same shape."""
        found: torch.Tensor = checkpoint(self._dropped, features, use_reentrant=False)
        return found

    def _dropped(self, features: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(features), 0.2)


@contextmanager
def open_run(training_run: Any, **arguments: Any) -> Iterator[dlac.TrainingRun]:
    """With `launch.mesh.ep` the feed-forward layers are experts, sharded over "ep" and equal over "efsdp"."""
    with training_run(**arguments) as run:
        setattr(train, "split", partial(split, run, train.split))  # noqa: B010 - the example has no experts
        yield run


def split(run: dlac.TrainingRun, split_all: Any, model: train.Gpt, mesh: DeviceMesh) -> None:
    """Split the experts of a stage, and then all that the example splits."""
    for block in model.blocks.values() if run.spec.launch.mesh.ep > 1 else ():
        assert isinstance(block, train.Block)
        fully_shard([block.up, block.down], mesh=run.expert_mesh["efsdp", "ep"])
    split_all(model, mesh)


def main() -> None:
    """Train, and write an entry for each batch whose step is done."""
    record = dlac.TrainingRun.record_step

    def recorded(run: Any, loss: Any, *, applied: bool | None = None) -> bool:
        batch = run._batch
        rows = batch["row_id"][batch.valid].tolist() if "row_id" in batch.tensors else []
        train_tiny.write_entry(run, batch, torch.zeros(()) if loss is None else loss, rows)
        return record(run, loss, applied=applied)

    setattr(dlac.TrainingRun, "record_step", recorded)  # noqa: B010 - the example has no journal
    if "--dropout" in sys.argv:
        setattr(train, "Block", DroppingBlock)  # noqa: B010 - as above
    arguments: dict[str, Any] = {}
    if "--own-mesh" in sys.argv:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        arguments = {"spec": os.environ["JOB_SPEC"], "mesh": mesh}
    setattr(dlac, "training_run", partial(open_run, dlac.training_run, **arguments))  # noqa: B010 - as above
    train.main()


if __name__ == "__main__":
    main()
