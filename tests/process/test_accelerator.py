"""Work on accelerators, with a fake one that a separate process registers with PyTorch."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from dlac_pipeline.checkpoint.step_sync import start_reading
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.read.device import DeviceCopies, can_pin_memory
from tests.forked import Forked

PROGRAM = Path(__file__).parents[1] / "programs" / "use_fake_device.py"


@pytest.fixture(scope="module")
def results() -> Any:
    """The results of the program."""
    with Forked([sys.executable, str(PROGRAM)], stdout=subprocess.PIPE, text=True) as program:
        output, _ = program.communicate()
    assert program.returncode == 0
    return json.loads(output)


def test_batches_are_copied_on_own_stream(results: Any) -> None:
    """Copies run on their own stream, and the computation waits for them. Pageable memory and cursors are copied at once."""
    found = results["batches"]
    one = ["copied to fake on copies"] * 3 + ["default waits for copies"] + ["used on default"] * 3
    assert found["copied"] == one + one
    assert found["tokens"] == [[[1, 2, 3], [4, 5, 6]], [[2, 3, 4], [5, 6, 7]]]
    assert found["pageable"][:3] == ["waited for a copy to fake on copies"] * 3
    assert (found["mean"], found["computed"], found["as_batch"]) == (2.0, [], 4.0)
    assert (found["devices"], found["dict"]) == (["fake"], ["fake", "fake", "cpu"])


def test_loss_is_read_late(results: Any) -> None:
    """After the first step each loss is read in a later step, or at a flush. An attempt after a failure waits for each one."""
    losses = results["losses"]
    assert losses["beats"] == [[2, 1, [1.0]], [4, 2, [2.0]]]
    assert losses["flushed"] == [[6, [3.0, 4.0, 5.0, 6.0]]]
    assert [step for step, log in enumerate(losses["read_at"], start=1) if "waited for an event" in log] == [1, 3]
    assert all("copied to cpu on default" in log for log in losses["read_at"])
    assert not any("waited for a number" in log for log in losses["read_at"])
    assert ["waited for a number" in log for log in results["waiting"]] == [True, True, False, False]
    assert results["mixed"] == [[None, None], [[1, [2.0]]] * 2, [None, None], [[2, [4.0]]] * 2]


def test_staged_shards_are_on_host(results: Any) -> None:
    """The copy of a DTensor whose shard is on the device has its values, in host memory."""
    copies = results["copies"]
    assert (copies["sharded_on"], copies["whole_on"]) == ("cpu", "cpu")
    assert copies["staged_bytes"] == [32, 32]  # reusable memory, once for DTensor and shard
    assert copies["numbers"] == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]]


def test_device_generator_is_restored(results: Any) -> None:
    """This holds for any accelerator type. A checkpoint without its state does not change the generator."""
    assert results["generators"]["found"] == results["generators"]["expected"]
    assert results["generators"]["older_left_alone"]


def test_unknown_device_is_named(results: Any) -> None:
    """The error lists the devices of this node."""
    assert results["unknown"].startswith("expected device to be one of ['cpu', 'fake:0'], found 'fake:3'")
    unknown: Any
    for unknown in ("cuda", "no such device", 1.5):
        with pytest.raises(SpecInvalid, match=r"one of \['cpu'\], found"):
            DeviceCopies(unknown)


def test_host_copies_nothing() -> None:
    """Without an accelerator a batch is not copied, even if page-locked memory is requested."""
    batch = {"tokens": torch.ones(3)}
    assert DeviceCopies("cpu", pin_memory=True).copy(batch) is batch
    assert DeviceCopies(None, pin_memory=True).copy(batch) is batch
    assert not can_pin_memory()


def test_host_loss_is_read_at_once() -> None:
    """On the CPU the loss is ready, and a script may change its tensor later."""
    loss = torch.tensor([1.5], requires_grad=True)
    reading = start_reading(loss)
    with torch.no_grad():
        loss.zero_()
    assert (reading.copied, reading.wait()) == (None, 1.5)
