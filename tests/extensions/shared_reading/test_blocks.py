import os
import resource

import pytest
import torch

from dlac_pipeline.extensions.shared_reading.blocks import Blocks, MappedBlock
from dlac_pipeline.lakehouse.errors import SpecInvalid

BATCH = [torch.arange(7.0), torch.arange(4).reshape(2, 2), torch.tensor([True, False]), torch.zeros(0, 3)]


def test_mapped_batch_is_private() -> None:
    """What a process writes into its tensors, no other process sees. The block is used again once all are done with it."""
    blocks = Blocks(others=2)
    block, is_new, layout = blocks.write(BATCH)
    assert is_new
    mapped = [MappedBlock(os.dup(block.file), index) for index in range(2)]
    one, two = (each.tensors(layout) for each in mapped)
    one[0] += 1
    assert [each.dtype for each in two] == [each.dtype for each in BATCH]
    assert all(map(torch.equal, two, BATCH))
    assert one[0].tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    view = two[0][2:]
    del one, two
    assert blocks.write(BATCH)[0] is not block, "a view of a tensor is in use"
    del view
    assert blocks.write(BATCH)[:2] == (block, False)
    for each in mapped:
        each.close()
    blocks.close()


def test_forked_process_frees_nothing() -> None:
    """A worker of a script inherits a batch, and drops it. The batch of its parent stays."""
    blocks = Blocks(others=1)
    block, _, layout = blocks.write(BATCH)
    mapped = MappedBlock(os.dup(block.file), 0)
    held = [mapped.tensors(layout)]
    child = os.fork()
    if not child:
        held.clear()
        os._exit(0)
    os.waitpid(child, 0)
    blocks.write([torch.full((7,), 99.0)])
    assert torch.equal(held[0][0], BATCH[0])
    mapped.close()
    blocks.close()


def test_larger_batch_replaces_a_free_block() -> None:
    """A block that is free and too small makes room, under its number."""
    blocks = Blocks(others=1)
    small, _, layout = blocks.write(BATCH)
    mapped = MappedBlock(os.dup(small.file), 0)
    mapped.tensors(layout).clear()
    large, is_new, _ = blocks.write([torch.zeros(100_000)])
    assert (large.number, is_new) == (small.number, True)
    mapped.close()
    blocks.close()


def test_full_memory_is_named() -> None:
    """A batch for which the node has no memory ends in an error that names the setting, and not in a signal."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        with pytest.raises(SpecInvalid, match=r'expected \d+ bytes of shared memory for a batch.*read.shares = "each"'):
            Blocks(others=1).write([torch.zeros(2**20)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
