from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from dlac_pipeline.lakehouse.errors import CursorMismatch, SpecInvalid
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.documents import Documents, documents_of, samples_of
from dlac_pipeline.read.line import BlockAdvance, merge
from dlac_pipeline.read.packing import BEGINNING, Packer, Sampler
from dlac_pipeline.rows.transform import Transform
from tests.takes import take

REASON = "ValueError: bad"
REJECTED = -1
Blocks = dict[int, dict[int, int]]
"""Block -> position -> tokens of the row. The transform raises for REJECTED rows."""


def lists(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Return each number n as a list of n tokens."""
    counts = batch["count"].to_pylist()
    if REJECTED in counts:
        raise ValueError("bad")
    return pa.record_batch({"tokens": pa.array([[5] * count for count in counts], pa.list_(pa.int32()))})


def blocks(given: Blocks, start: Cursor = BEGINNING) -> Iterator[tuple[int, int, Documents]]:
    """Yield the blocks of pass 0 from a cursor."""
    for block, rows in given.items():
        if block >= start.block:
            kept = {at: n for at, n in rows.items() if block > start.block or at >= start.position}
            live = pa.table({"count": pa.array(list(kept.values()), pa.int64())})
            positions = np.array(list(kept), np.int64)
            transform = Transform("tests:lists", "digest", lists)
            yield (
                0,
                block,
                documents_of(live, positions, column="tokens", transform=transform, reject="quarantine"),
            )


def comparable(advances: list[BlockAdvance]) -> list[tuple[object, ...]]:
    """Return (next cursor, first cursor, rows consumed, filtered, quarantined) of each advance."""
    return [(a.cursor, a.position_start, a.rows_consumed, a.filtered.tolist(), a.quarantined) for a in advances]


def test_trailing_rows_follow_next_block() -> None:
    """Rows without tokens after a block's last token are in the advance of the next block's first token, and no earlier one."""
    packer = Packer(blocks({0: {1: 4, 2: 0, 5: REJECTED}, 1: {0: 4, 6: 0}}), length=4)
    first, second = take(packer, 1), take(packer, 1)
    assert comparable(first.advances) == [(Cursor(0, 0, 2), 0, 1, [], ())]
    assert comparable(second.advances) == [
        (Cursor(0, 0, 6), 2, 0, [2], ((5, REASON),)),
        (Cursor(0, 1, 7), 0, 1, [6], ()),
    ]
    assert packer.exhausted
    assert packer.cursor == Cursor(0, 1, 7)


def test_partial_row_is_consumed_once() -> None:
    """The first advance ends with its token_end, and the second begins in the same row with that as its token_start."""
    packer = Packer(blocks({0: {2: 6, 4: 6}}), length=4)
    first, second = take(packer, 1).advances[0], take(packer, 1).advances[0]
    assert (first.position_start, first.position_end, first.token_start, first.token_end) == (0, 3, None, 4)
    assert (second.position_start, second.position_end, second.token_start, second.token_end) == (2, 5, 4, 2)
    assert (first.rows_consumed, second.rows_consumed) == (0, 1)
    assert merge([first, second])[0].cursor == Cursor(0, 0, 4, 2)


def test_line_without_tokens_gives_empty_take() -> None:
    """Rows without tokens are in an advance even if no sequence follows."""
    packer = Packer(blocks({0: {3: 0}}), length=4)
    assert not packer.exhausted
    taken = take(packer, 2)
    assert (taken.count, taken.columns["tokens"].shape, taken.cursor) == (0, (0, 4), Cursor(0, 0, 4))
    assert taken.advances[0].filtered.tolist() == [3]
    assert packer.exhausted


@pytest.mark.parametrize(
    ("start", "found"),
    [
        (Cursor(0, 0, 3, 2), "0 items of the row at position None"),
        (Cursor(0, 0, 1, 4), "4 items of the row at position 1"),
        (Cursor(0, 0, 0, 1), "4 items of the row at position 1"),
        (Cursor(0, 5, 1, 2), "block 6 of pass 0"),
    ],
)
def test_contradicting_cursor_is_refused(start: Cursor, found: str) -> None:
    """The error of a cursor in a missing row, or beyond a row's tokens, names the position found."""
    packer = Packer(blocks({0: {1: 4, 3: 0}, 6: {0: 4}}, start), length=4, start=start)
    with pytest.raises(CursorMismatch, match=found):
        take(packer, 1)


def test_rows_before_cursor_are_refused() -> None:
    """A first block with rows before the cursor would repeat them."""
    with pytest.raises(CursorMismatch, match="found a row at position 1"):
        take(Packer(blocks({0: {1: 4}}), length=4, start=Cursor(0, 0, 2)), 1)


def test_separate_advances_are_not_merged() -> None:
    """A missing advance is an error."""
    packer = Packer(blocks({0: {0: 4, 1: 4, 2: 4}}), length=4)
    one, _, three = (take(packer, 1).advances[0] for _ in range(3))
    with pytest.raises(CursorMismatch, match="missing or double"):
        merge([one, three])


def test_failed_block_is_not_end() -> None:
    """A line whose next block failed raises again for every call, and never looks exhausted."""

    def failing() -> Iterator[tuple[int, int, Documents]]:
        yield from blocks({0: {0: 4}})
        raise OSError("gone")

    packer = Packer(failing(), length=4)
    for _ in range(2):
        with pytest.raises(OSError, match="gone"):
            take(packer, 2)
    assert packer.cursor == BEGINNING


def test_empty_sequence_is_refused() -> None:
    """T = 0 is refused."""
    with pytest.raises(SpecInvalid, match="found length 0"):
        Packer(iter(()), length=0)


def test_single_block_is_not_copied() -> None:
    """Tokens from one block are a view of its Arrow buffer."""
    live = pa.table({"tokens": pa.array([[1, 2, 3], [4, 5, 6, 7, 8]], pa.list_(pa.int32()))})
    documents = documents_of(live, np.arange(2), column="tokens")
    packed = take(Packer(iter([(0, 0, documents)]), length=4), 2)
    assert np.shares_memory(packed.columns["tokens"], live["tokens"].chunk(0).values.to_numpy())
    assert packed.columns["document"].tolist() == [[1, 1, 1, 2], [1, 1, 1, 1]]
    assert packed.columns["position"].tolist() == [[0, 1, 2, 0], [0, 1, 2, 3]]


def test_block_rows_are_samples() -> None:
    """Every row is a sample if there is no transform."""
    live = pa.table({"x": pa.array([5, 6, 7]), "y": pa.array([[1.0, 2.0]] * 3)})
    samples = samples_of(live, np.array([2, 4, 9]), first={})
    taken = take(Sampler(iter([(3, 1, samples)])), 2)
    assert taken.columns["x"].tolist() == [5, 6]
    assert taken.columns["y"].shape == (2, 2)
    assert taken.cursor == Cursor(3, 1, 5)
    assert samples.nbytes > 0
