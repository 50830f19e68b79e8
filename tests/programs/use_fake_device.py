"""Use all of DLAC's code for accelerators on a fake one, and print the results as JSON."""

import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import fake_device  # type: ignore[import-not-found]  # in this folder
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dlac_pipeline.checkpoint.rng import load_rng, save_rng
from dlac_pipeline.checkpoint.stage.copies import Copies, CopyMemory, Direct
from dlac_pipeline.checkpoint.step_sync import RankReport, StepSyncs
from dlac_pipeline.extensions.dataset.batches import as_batch, as_dict, copy_batch
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.device import DeviceCopies

LOG = fake_device.LOG


def batch_of(step: int) -> Batch:
    """Return any batch."""
    return Batch(
        step=step,
        tensors={"tokens": torch.arange(6).reshape(2, 3) + step},
        valid=torch.tensor([True, False]),
        source=torch.tensor([0, -1]),
        rows=1,
        tokens=3,
        readers=1,
        cursors=np.zeros((1, 1, 4), dtype=np.int64),
    )


def use_batches() -> dict[str, Any]:
    """Copy batches, and take a mean of losses on the device."""
    copies = DeviceCopies("fake")
    LOG.clear()
    batches = [batch_of(step).copy_with(copies) for step in (1, 2)]
    copied = list(LOG)
    LOG.clear()
    mean = batches[0].mean(fake_device.FakeTensor(torch.tensor([2.0, float("nan")])))
    computed = list(LOG)
    given = copy_batch(as_dict(batch_of(3)), copies)
    return {
        "devices": sorted({batches[0][name].device.type for name in ("tokens",)} | {batches[0].valid.device.type}),
        "tokens": [batch["tokens"].cpu().tolist() for batch in batches],
        "copied": copied,
        "mean": mean.cpu().item(),
        "computed": computed,
        "dict": [given["tokens"].device.type, given["dlac"]["valid"].device.type, given["dlac"]["cursors"].device.type],
        "as_batch": as_batch(given).mean(fake_device.FakeTensor(torch.tensor([4.0, 1.0]))).cpu().item(),
        "pageable": _pageable(),
    }


def _pageable() -> list[str]:
    LOG.clear()
    batch_of(1).copy_with(DeviceCopies("fake:0", pin_memory=False))
    return list(LOG)


def use_losses() -> dict[str, Any]:
    """Report steps. The loss of step n is n."""
    pulse, beats = StepSyncs(1, None), []
    LOG.clear()
    read_at = []
    for step in range(1, 7):
        before = len(LOG)
        beat = pulse.step_done(step, loss=fake_device.FakeTensor(torch.tensor(float(step))), report=RankReport())
        read_at.append(LOG[before:])
        beats += [[step, beat.step, beat.losses]] if beat else []
    flushed = [[beat.step, beat.losses] for beat in pulse.flush()]
    return {"beats": beats, "flushed": flushed, "read_at": read_at}


def use_waiting_syncs() -> list[list[str]]:
    """Report steps that wait for their losses, and then some that do not."""
    pulse, logs = StepSyncs(1, None), []
    for step in range(1, 5):
        pulse.waits_for_losses = step <= 2
        LOG.clear()
        pulse.step_done(step, loss=fake_device.FakeTensor(torch.tensor(float(step))), report=RankReport())
        logs.append(list(LOG))
    return logs


def use_mixed_losses() -> list[Any]:
    """Report steps of two ranks, only one with its loss on a device, and return the messages that each receives."""
    sent: list[torch.Tensor] = []

    def add(message: torch.Tensor, **_: object) -> None:
        sent.append(message)
        if len(sent) == 2:
            sent[0].copy_(sent[0] + sent[1])
            sent[1].copy_(sent[0])
            sent.clear()

    patched: Any = dist
    patched.all_reduce, kept = add, dist.all_reduce
    pulses, received = [StepSyncs(2, None), StepSyncs(2, None)], []
    for step in range(1, 5):
        losses = [fake_device.FakeTensor(torch.tensor(float(step))), 3.0 * step]
        beats = [
            pulse.step_done(step, loss=loss, report=RankReport()) for pulse, loss in zip(pulses, losses, strict=True)
        ]
        received.append([None if beat is None else [beat.step, beat.losses] for beat in beats])
    patched.all_reduce = kept
    return received


def use_copies(folder: Path) -> dict[str, Any]:
    """Stage tensors of the device, and a DTensor whose shard is on it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    plain = distribute_tensor(torch.arange(8.0).reshape(4, 2), mesh, [Shard(0)])
    shard = fake_device.FakeTensor(torch.arange(8.0).reshape(4, 2))
    sharded = DTensor(shard, plain._spec, requires_grad=False)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    copies = Copies(CopyMemory())
    copies.write(folder / "state.pt", {"sharded": sharded, "whole": shard})
    staged = copies._states[0][1]
    shard.host.zero_()
    on_host, staged_bytes = Copies(CopyMemory()), []
    for tensor in (plain, plain.to_local()):
        on_host.write(folder / "state.pt", tensor)
        staged_bytes.append(sum(each.nbytes() for each in on_host.storages))
    found = {
        "staged_bytes": staged_bytes,
        "sharded_on": staged["sharded"].to_local().device.type,
        "whole_on": staged["whole"].device.type,
        "numbers": staged["sharded"].to_local().tolist(),
    }
    dist.destroy_process_group()
    return found


def use_generators(folder: Path, module: Any) -> dict[str, Any]:
    """Save and restore the device's generator with all generators, and a state that has only CUDA's."""
    save_rng(folder, 0, Direct().write)
    expected = torch.rand((), generator=module.generator).item()
    torch.rand((), generator=module.generator)
    load_rng(folder, 0)
    found = torch.rand((), generator=module.generator).item()
    older = torch.load(folder / "rng-00000.pt")
    del older["fake"]
    torch.save(older, folder / "rng-00001.pt")
    before, drawn = module.get_rng_state(), random.random()
    load_rng(folder, 1)
    same = torch.equal(before, module.get_rng_state())
    return {"expected": expected, "found": found, "older_left_alone": same and random.random() == drawn}


def use_unknown() -> str:
    """Request a device that does not exist."""
    try:
        DeviceCopies("fake:3")
    except SpecInvalid as err:
        return str(err)
    return "nothing"


def main() -> None:
    """Run all parts, and print the results."""
    module = fake_device.register()
    with tempfile.TemporaryDirectory() as folder:
        found = {
            "batches": use_batches(),
            "losses": use_losses(),
            "mixed": use_mixed_losses(),
            "waiting": use_waiting_syncs(),
            "copies": use_copies(Path(folder)),
            "generators": use_generators(Path(folder), module),
            "unknown": use_unknown(),
        }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
