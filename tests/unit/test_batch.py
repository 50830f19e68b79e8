from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlac_pipeline.dataset.batches import as_batch, as_dict
from dlac_pipeline.read.batch import Batch


def packed() -> Batch:
    """Return one of two ranks' part of a packed global batch of 3 samples. One slot is empty."""
    return Batch(
        step=1,
        tensors={"document": torch.tensor([[1, 1, 2, 0], [0, 0, 0, 0]])},
        valid=torch.tensor([True, False]),
        source=torch.tensor([0, -1]),
        rows=3,
        tokens=10,
        world_size=2,
        cursors=np.zeros((1, 1, 4), dtype=np.int64),
    )


def test_empty_slots_do_not_count() -> None:
    """The values of empty slots and of padding have no effect, whatever the model returns for them."""
    nan = float("nan")
    assert packed().mean(torch.tensor([6.0, nan])) == 6.0 * 2 / 3
    assert packed().token_mean(torch.tensor([[1.0, 2.0, 3.0, nan], [nan] * 4])) == pytest.approx(6.0 * 2 / 10)


def test_losses_may_be_on_accelerator() -> None:
    """The shares of the losses are on their device, and devices are not mixed. The batch stays on its own device."""
    batch = packed()
    with FakeTensorMode(allow_non_fake_inputs=True):  # refuses mixed devices, as CUDA does
        assert batch.mean(torch.ones(2, device="cuda")).device.type == "cuda"
        assert batch.token_mean(torch.ones(2, 4, device="cuda")).device.type == "cuda"
    assert batch.mean(torch.ones(2, device="meta")).device.type == "meta"
    assert batch.token_mean(torch.ones(2, 4, device="meta")).device.type == "meta"
    assert {batch.valid.device.type, batch["document"].device.type} == {"cpu"}


def test_moved_batch_takes_losses_on_device() -> None:
    """Accelerate moves dicts to the device in this way."""
    given = as_dict(packed())
    given["document"] = given["document"].to("meta")
    given["dlac"] = {**given["dlac"], "valid": given["dlac"]["valid"].to("meta")}
    moved = as_batch(given)
    assert moved.mean(torch.ones(2, device="meta")).device.type == "meta"
    assert moved.token_mean(torch.ones(2, 4, device="meta")).device.type == "meta"
