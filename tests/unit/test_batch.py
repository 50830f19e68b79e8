import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dlac_pipeline.extensions.trainers.run_loader import cut, weigh
from dlac_pipeline.read.batch import Batch
from tests.small_records import small_batch


def packed() -> Batch:
    """Return one of two ranks' part of a packed global batch of 3 samples. One slot is empty."""
    tensors = {"document": torch.tensor([[1, 1, 2, 0], [0, 0, 0, 0]])}
    valid, source = torch.tensor([True, False]), torch.tensor([0, -1])
    return small_batch(tensors=tensors, valid=valid, source=source, rows=3, tokens=10, readers=2)


def test_empty_slots_do_not_count() -> None:
    """The values of empty slots and of padding have no effect, whatever the model returns for them."""
    nan = float("nan")
    assert packed().mean(torch.tensor([6.0, nan])) == 6.0 * 2 / 3
    assert packed().token_mean(torch.tensor([[1.0, 2.0, 3.0, nan], [nan] * 4])) == pytest.approx(6.0 * 2 / 10)


def test_losses_may_be_on_accelerator() -> None:
    """The shares of the losses are on the device of the losses, and devices are not mixed. The batch stays on its device."""
    batch = packed()
    with FakeTensorMode(allow_non_fake_inputs=True):  # refuses mixed devices, as CUDA does
        assert batch.mean(torch.ones(2, device="cuda")).device.type == "cuda"
        assert batch.token_mean(torch.ones(2, 4, device="cuda")).device.type == "cuda"
    assert batch.mean(torch.ones(2, device="meta")).device.type == "meta"
    assert batch.token_mean(torch.ones(2, 4, device="meta")).device.type == "meta"
    assert {batch.valid.device.type, batch["document"].device.type} == {"cpu"}


def rank_batch(rank: int, rows: int, *, world_size: int = 2, slots: int = 5) -> Batch:
    """Return a rank's part of a global batch with some valid slots: every third one, up to `rows`."""
    at = torch.arange(rank * slots, (rank + 1) * slots)
    valid = at * 3 % (slots * world_size) < rows
    lengths = torch.where(valid, at % 4, 0)
    tensors = {
        "x": torch.where(valid, at + 1.0, 0.0),
        "tokens": torch.repeat_interleave(at, lengths),
        "tokens.offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
    }
    source = torch.where(valid, 0, -1)
    return small_batch(tensors=tensors, valid=valid, source=source, rows=rows, tokens=rows, readers=world_size)


@pytest.mark.parametrize("rows", range(1, 11))
@pytest.mark.parametrize("parts", [1, 2, 5])
def test_micro_batches_average_to_mean(rows: int, parts: int) -> None:
    """Weighed means, and means of the micro-batches, average over parts and ranks to the mean over the valid samples."""
    ranks = [rank_batch(rank, rows) for rank in range(2)]
    cuts = [list(cut(batch, parts, full=rows == 10)) for batch in ranks]
    samples = torch.cat([batch["x"][batch.valid] for batch in ranks])
    given = torch.cat([part["x"][part.valid] for parts_of in cuts for part, _ in parts_of])
    assert given.tolist() == samples.tolist()
    assert all(len(parts_of) == parts for parts_of in cuts)
    means = [part.mean(part["x"]) for parts_of in cuts for part, _ in parts_of]
    weighed = [weigh(part["x"].mean(), weight) for parts_of in cuts for part, weight in parts_of]
    assert all(part.weight == weight for parts_of in cuts for part, weight in parts_of)
    for found in (means, weighed):
        assert torch.stack(found).mean().item() == pytest.approx(samples.mean().item())


def test_micro_batches_keep_ragged_values() -> None:
    """Each sample of a micro-batch has its values. A part without a sample is one invalid slot."""
    batch = rank_batch(0, 7)
    parts = [part for part, _ in cut(batch, 2, full=False)]
    for part in parts:
        starts = part["tokens.offsets"]
        assert starts[0] == 0
        for slot, place in enumerate((part["x"] - 1).long().tolist()):
            assert part["tokens"][starts[slot] : starts[slot + 1]].tolist() == [place] * (place % 4)
    empty, weight = next(cut(rank_batch(1, 1), 1, full=False))
    assert (len(empty["x"]), empty.valid.tolist(), empty.weight, weight) == (1, [False], 0, 0)


def test_lossless_part_hides_nan() -> None:
    """The loss of a part without a sample is 0, also if it is not finite."""
    value = torch.tensor(2.0)
    assert weigh(value * float("inf"), 0.0) == 0
    assert weigh(value, 0.5) == 1
