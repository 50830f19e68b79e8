"""Blocks decoded ahead stay within the memory budget, by their real sizes and not only by estimates."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from dlac_pipeline.read.prefetch import Prefetcher, Wanted

MB = 2**20


@pytest.fixture
def prefetch() -> Iterator[Prefetcher]:
    """Yield a prefetcher with two threads and 10 MB."""
    made = Prefetcher(threads=2, budget_bytes=10 * MB)
    yield made
    made.close()


def wanted(
    block: int,
    *,
    estimate: int = MB,
    size: int = MB,
    scratch: int = 0,
    begun: list[int] | None = None,
) -> Wanted[int]:
    """Return a block whose real size is `size` bytes. Its preparation is recorded in `begun`."""

    def prepare() -> int:
        if begun is not None:
            begun.append(block)
        return size

    return Wanted((0, 0, 0, block, 0), estimate, scratch, prepare, int)


def test_blocks_are_prepared_within_budget(prefetch: Prefetcher) -> None:
    """Ten blocks of 1 MB fit. The next one begins when one was read, or as much of one, and a needed one at once."""
    begun: list[int] = []
    blocks = [wanted(block, begun=begun) for block in range(14)]
    for block in blocks:
        prefetch.ask(block)
    prefetch.settle()
    assert sorted(begun) == list(range(10))
    prefetch.take(blocks[0])
    prefetch.release(blocks[0].key)
    prefetch.settle()
    assert sorted(begun) == list(range(11))
    prefetch.take(blocks[1])
    prefetch.shrink(blocks[1].key, 0)
    prefetch.begin(blocks[13].key)
    prefetch.settle()
    assert sorted(begun) == [*range(12), 13]


def test_block_counts_with_real_size(prefetch: Prefetcher) -> None:
    """A block that was estimated as 1 MB and takes 8 leaves room for 2."""
    prefetch.ask(wanted(0, size=8 * MB))
    prefetch.settle()
    for block in range(1, 5):
        prefetch.ask(wanted(block))
    prefetch.settle()
    assert prefetch.peak_bytes == 10 * MB
    assert prefetch.take(wanted(0, size=8 * MB)) == 8 * MB
    assert prefetch.waited_s == 0


def test_scratch_memory_counts(prefetch: Prefetcher) -> None:
    """The scratch memory of both threads is not available to blocks."""
    begun: list[int] = []
    for block in range(4):
        prefetch.ask(wanted(block, scratch=4 * MB, begun=begun))
    prefetch.settle()
    assert sorted(begun) == [0, 1]


def test_oversized_blocks_warn_once(prefetch: Prefetcher) -> None:
    """Needed blocks are prepared in any case, with one warning that names the remedy."""
    prefetch.take(wanted(0, size=6 * MB))
    with pytest.warns(
        UserWarning, match="leave room in 10 MB, found that the 2 blocks being read take 12 MB: .*raise read.budget_mb"
    ):
        prefetch.take(wanted(1, size=6 * MB))
    prefetch.take(wanted(2, size=6 * MB))


def test_failed_block_raises_when_taken(prefetch: Prefetcher) -> None:
    """Neither the request for it nor the one for another block raises."""

    def fail() -> int:
        raise OSError("away")

    block = replace(wanted(0), prepare=fail)
    prefetch.ask(block)
    prefetch.settle()
    prefetch.ask(wanted(1))
    with pytest.raises(OSError, match="away"):
        prefetch.take(block)
