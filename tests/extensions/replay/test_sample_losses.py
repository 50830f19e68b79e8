"""Losses of single samples, from the values that a script passes to the means of its batches."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from dlac_pipeline.extensions.replay.spike_check import SampleLosses, SpikeCheck
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.spec.mesh_spec import MeshSpec
from tests.small_records import small_batch

NAN = float("nan")


def batch(step: int = 1) -> Batch:
    """Return the batch of a rank with three slots. The last one is empty."""
    document = torch.tensor([[1, 1, 2, 0], [1, 2, 3, 3], [0, 0, 0, 0]])
    valid, source = torch.tensor([True, True, False]), torch.tensor([0, 0, -1])
    tensors = {"document": document}
    return small_batch(step=step, tensors=tensors, valid=valid, source=source, rows=2, tokens=7, readers=2)


def kept() -> tuple[SampleLosses, Batch]:
    """Return the losses of a batch, and the batch that gives them."""
    losses = SampleLosses(batch())
    return losses, replace(batch(), on_mean=losses.add)


def test_micro_batches_add_up() -> None:
    """Values with zeros elsewhere add up. A measure without a graph does not count, and the mean is unchanged."""
    losses, mine = kept()
    mine.mean(torch.tensor([9.0, 9.0, 9.0]))
    one = torch.tensor([4.0, 0.0, NAN], requires_grad=True)
    assert mine.mean(one) == batch().mean(one)
    mine.mean(torch.tensor([0.0, 6.0, NAN], requires_grad=True))
    mine.mean(torch.tensor([7.0, 7.0, 7.0]))
    assert losses.read() == [[(4.0, 1)], [(6.0, 1)], []]


def test_documents_have_means_of_tokens() -> None:
    """Each document has the mean over its tokens and their number. Values of whole samples are added."""
    losses, mine = kept()
    mine.token_mean(torch.tensor([[1.0, 3.0, 5.0, NAN], [1.0, 2.0, 3.0, 5.0], [NAN] * 4]))
    assert losses.read() == [[(2.0, 2), (5.0, 1)], [(1.0, 1), (2.0, 1), (4.0, 2)], []]
    mine.mean(torch.tensor([10.0, 20.0, 30.0]))
    assert losses.read() == [[(12.0, 2), (15.0, 1)], [(21.0, 1), (22.0, 1), (24.0, 2)], []]


def test_only_values_of_samples_count() -> None:
    """A step without values, or with others than one per sample, has no losses."""
    losses, mine = kept()
    mine.mean(torch.tensor(2.0))
    assert not losses.sums
    assert losses.read() == [[], [], []]


def test_ranks_of_a_share_count_once() -> None:
    """Of the ranks of a share the first one of the last stage gives its losses. Ranks of other stages have none."""
    spec: Any = SimpleNamespace(run="r", launch=SimpleNamespace(on_spike=None, mesh=MeshSpec(tp=2, pp=2)))

    def gathered(rank: int) -> list[Any]:
        tree: Any = SimpleNamespace(rank=rank, world_size=4, gather=lambda mine: [mine])
        attempt: Any = SimpleNamespace(rehearses=True, point=SimpleNamespace(spike_step=0))
        check = SpikeCheck(spec, attempt, tree, print)
        check.watch(batch()).mean(torch.tensor([4.0, 6.0, NAN]))
        return check.gather(1)

    assert [gathered(rank) for rank in range(4)] == [[], [], [[[4.0, 1]], [[6.0, 1]], []], []]
