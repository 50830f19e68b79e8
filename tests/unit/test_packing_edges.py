from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from dlac_pipeline.lakehouse.errors import CursorMismatch, SpecInvalid
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.documents import Documents, documents_of
from dlac_pipeline.read.line import merge
from dlac_pipeline.read.packing import BEGINNING, Packer
from tests.takes import take

Blocks = dict[int, dict[int, int]]
"""Block -> position -> tokens of the row."""


def blocks(given: Blocks, start: Cursor = BEGINNING) -> Iterator[tuple[int, int, Documents]]:
    """Yield the blocks of pass 0 from a cursor."""
    for block, rows in given.items():
        if block >= start.block:
            kept = {at: n for at, n in rows.items() if block > start.block or at >= start.position}
            tokens = pa.array([[5] * count for count in kept.values()], pa.list_(pa.int32()))
            yield 0, block, documents_of(pa.table({"tokens": tokens}), np.array(list(kept), np.int64), column="tokens")


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
