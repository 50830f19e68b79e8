"""Rows and documents packed into sequences, in any blocks and from any cursor."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlac_pipeline.extensions.sequences.documents import Documents, documents_of
from dlac_pipeline.extensions.sequences.packing import Packer
from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.read.line import BlockAdvance, merge
from dlac_pipeline.read.packing import BEGINNING, Sampler
from dlac_pipeline.read.samples import Samples, source_rows
from tests.takes import Taken, take

EXAMPLES = settings(max_examples=50, deadline=None)
PAD = -1
REASON = "ValueError: bad"


@dataclass(frozen=True)
class Row:
    """A live row: its position and the lengths of its documents, or its rejection."""

    position: int
    documents: tuple[int, ...]
    rejected: bool = False

    @property
    def tokens(self) -> int:
        """Return the number of tokens of the row."""
        return 0 if self.rejected else sum(self.documents)


@dataclass(frozen=True)
class Line:
    """The blocks of a key group: (pass, block) -> its live rows. Every token is a different number."""

    blocks: dict[tuple[int, int], tuple[Row, ...]] = field(default_factory=dict)

    def tokens_of(self, key: tuple[int, int]) -> list[list[int]]:
        """Return the tokens of each row of a block."""
        before = sum(row.tokens for other, rows in self.blocks.items() if other < key for row in rows)
        given = []
        for row in self.blocks[key]:
            given.append(list(range(before, before + row.tokens)))
            before += row.tokens
        return given

    @property
    def total(self) -> int:
        """Return the number of tokens of all blocks."""
        return sum(row.tokens for rows in self.blocks.values() for row in rows)

    def documents(self, start: Cursor) -> Iterator[tuple[int, int, Documents]]:
        """Yield the blocks of a reader that resumes at `start`."""
        for key, rows in self.blocks.items():
            if key >= start[:2]:
                begin = start.position if key == start[:2] else 0
                yield *key, self._content(key, [i for i, row in enumerate(rows) if row.position >= begin])

    def _content(self, key: tuple[int, int], keep: list[int]) -> Documents:
        rows, tokens = self.blocks[key], self.tokens_of(key)
        taken = [rows[i] for i in keep]
        positions = np.array([row.position for row in taken], np.int64)
        lengths = [(n, i) for i, row in enumerate(taken) if not row.rejected for n in row.documents if n]
        ends = np.cumsum([n for n, _ in lengths]).astype(np.int64)
        rejected = tuple((row.position, REASON) for row in taken if row.rejected)
        values = np.array([token for i in keep for token in tokens[i]], np.int32)
        row_of = np.array([i for _, i in lengths], np.int64)
        return Documents(values, ends, source_rows(positions, row_of, rejected, ends))

    def samples(self, start: Cursor) -> Iterator[tuple[int, int, Samples]]:
        """Yield the same blocks, with each token as a sample."""
        for pass_index, block, documents in self.documents(start):
            columns = {"x": documents.values, "pair": np.stack([documents.values] * 2, axis=1)}
            yield pass_index, block, Samples(columns, documents.rows)


@st.composite
def lines(draw: st.DrawFn) -> Line:
    """Random blocks over some passes: rows with any number of documents, empty ones, rejected ones, dead rows between."""
    blocks = {}
    for pass_index in range(draw(st.integers(1, 2))):
        for block in range(draw(st.integers(0, 4))):
            rows, position = [], 0
            for _ in range(draw(st.integers(0, 6))):
                position += draw(st.integers(0, 2))
                documents = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
                rows.append(Row(position, documents, draw(st.integers(0, 5)) == 0))
                position += 1
            blocks[pass_index, block] = tuple(rows)
    return Line(blocks)


def read(line: Line, length: int, sizes: Sequence[int], *, drain: bool, start: Cursor = BEGINNING) -> list[Taken]:
    """Take sequences in steps of these sizes until none can follow."""
    packer = Packer(line.documents(start), length=length, start=start, drain=drain, pad_id=PAD)
    taken: list[Taken] = []
    while not packer.exhausted:
        taken.append(take(packer, sizes[len(taken) % len(sizes)]))
        assert taken[-1].cursor == packer.cursor
    return taken


def same(one: Taken, other: Taken) -> None:
    """Assert that two results are equal in all fields."""
    for name in ("tokens", "document", "position"):
        assert np.array_equal(one.columns[name], other.columns[name]), name
    assert (one.count, one.items, one.cursor) == (other.count, other.items, other.cursor)
    assert comparable(one.advances) == comparable(other.advances)


def comparable(advances: Sequence[BlockAdvance]) -> list[tuple[object, ...]]:
    """Return advances as comparable tuples."""
    return [
        (a.cursor, a.position_start, a.token_start, a.rows_consumed, a.filtered.tolist(), a.quarantined)
        for a in advances
    ]


def check_advances(line: Line, taken: Sequence[Taken]) -> None:
    """Check that advances have no gap, and count every row once as consumed, filtered or quarantined."""
    advances = [advance for each in taken for advance in each.advances]
    at: dict[tuple[int, int], Cursor] = {}
    for each in taken:
        for advance in each.advances:
            key = (advance.pass_index, advance.block)
            assert Cursor(*key, advance.position_start, advance.token_start or 0) == at.get(key, Cursor(*key))
            at[key] = advance.cursor
        if each.advances:
            assert each.cursor == each.advances[-1].cursor
    for advance in advances:
        passed = [
            row
            for row in line.blocks[advance.pass_index, advance.block]
            if advance.position_start <= row.position < advance.position_end
        ]
        assert advance.rows_consumed == len([row for row in passed if row.tokens]) - (advance.token_end is not None)
        assert advance.filtered.tolist() == [row.position for row in passed if not row.tokens and not row.rejected]
        assert advance.quarantined == tuple((row.position, REASON) for row in passed if row.rejected)
    assert comparable(merge(advances)) == comparable(merge(merge(advances)))


@EXAMPLES
@given(lines(), st.integers(1, 12), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_sequences_contain_all_tokens(line: Line, length: int, sizes: list[int]) -> None:
    """Every token is in the sequences once and in order, for any blocks, any T and any number of sequences per call."""
    taken = read(line, length, sizes, drain=True)
    flat = np.concatenate(
        [np.zeros(0, np.int32), *(each.columns["tokens"][each.columns["document"] > 0] for each in taken)]
    )
    assert np.array_equal(flat, np.arange(line.total))
    assert sum(each.count for each in taken) == -(-line.total // length)
    padding = np.concatenate(
        [np.zeros(0, np.int32), *(each.columns["tokens"][each.columns["document"] == 0] for each in taken)]
    )
    assert (padding == PAD).all()
    check_advances(line, taken)
    assert sum(a.rows_consumed for each in taken for a in each.advances) == sum(
        row.tokens > 0 for rows in line.blocks.values() for row in rows
    )
    passed_over = [a.position_start for each in taken for a in each.advances for _ in (*a.filtered, *a.quarantined)]
    assert len(passed_over) == sum(row.tokens == 0 for rows in line.blocks.values() for row in rows)


@EXAMPLES
@given(lines(), st.integers(1, 12), st.lists(st.integers(1, 4), min_size=1, max_size=3), st.booleans(), st.data())
def test_resume_at_any_cursor_is_identical(
    line: Line, length: int, sizes: list[int], drain: bool, data: st.DataObject
) -> None:
    """After any cursor the sequences, cursors and advances equal an uninterrupted reader's."""
    taken = read(line, length, sizes, drain=drain)
    for cut in data.draw(st.sets(st.integers(0, len(taken) - 1), max_size=8)) if taken else ():
        each = taken[cut]
        again = read(line, length, [*sizes[(cut + 1) % len(sizes) :], *sizes] * 99, drain=drain, start=each.cursor)
        rest = taken[cut + 1 :]
        if len(sizes) == 1:
            assert len(again) == len(rest)
            for one, other in zip(again, rest, strict=True):
                same(one, other)
        tokens = [
            np.concatenate([np.zeros((0, length), np.int32), *(p.columns["tokens"] for p in part)])
            for part in (again, rest)
        ]
        assert np.array_equal(tokens[0], tokens[1])
        joined = [comparable(merge(a for p in part for a in p.advances)) for part in (again, rest)]
        assert joined[0] == joined[1]


@EXAMPLES
@given(lines(), st.integers(1, 12), st.integers(0, 3), st.integers(1, 3), st.booleans())
def test_shared_key_group_is_one_line(line: Line, length: int, mine: int, theirs: int, drain: bool) -> None:
    """Skipping another rank's sequences gives the same cursor and rest as taking all of them."""
    whole = Packer(line.documents(Cursor()), length=length, drain=drain, pad_id=PAD)
    part = Packer(line.documents(Cursor()), length=length, drain=drain, pad_id=PAD)
    while not whole.exhausted:
        taken, skipped, own = take(whole, theirs + mine), take(part, theirs, lay_out=False), take(part, mine)
        assert taken.cursor == part.cursor
        assert taken.count == skipped.count + own.count
        assert np.array_equal(taken.columns["tokens"][skipped.count :], own.columns["tokens"])
        assert comparable(taken.advances) == comparable(merge([*skipped.advances, *own.advances]))
    assert part.exhausted


@EXAMPLES
@given(lines(), st.integers(1, 12), st.integers(1, 4))
def test_documents_and_positions_match_loop(line: Line, length: int, size: int) -> None:
    """Documents count from 1 in a sequence, and positions restart with each document and each sequence."""
    owner = [
        (key, row.position, index)
        for key, rows in line.blocks.items()
        for row in rows
        for index, tokens in enumerate(row.documents if not row.rejected else ())
        for _ in range(tokens)
    ]
    for packed in read(line, length, [size], drain=True):
        for tokens, document, position in zip(
            packed.columns["tokens"], packed.columns["document"], packed.columns["position"], strict=True
        ):
            number, at, previous = 0, 0, None
            for index, token in enumerate(tokens):
                if token == PAD:
                    assert (document[index], position[index]) == (0, 0)
                    continue
                number, at = (number, at + 1) if owner[token] == previous else (number + 1, 0)
                previous = owner[token]
                assert (document[index], position[index]) == (number, at)


@EXAMPLES
@given(lines(), st.integers(1, 12), st.integers(1, 4))
def test_partial_tail_stays_pending(line: Line, length: int, size: int) -> None:
    """Without draining only whole sequences are taken. The tail is read after the cursor, together with appended rows."""
    taken = read(line, length, [size], drain=False)
    assert sum(each.count for each in taken) == line.total // length
    assert all((each.columns["document"] > 0).all() for each in taken)
    check_advances(line, taken)
    more = Line({**line.blocks, (7, 0): (Row(0, (5,)), Row(3, (40,)))})
    rest = read(more, length, [size], drain=True, start=taken[-1].cursor if taken else Cursor())
    flat = np.concatenate([each.columns["tokens"][each.columns["document"] > 0] for each in [*taken, *rest]])
    assert np.array_equal(flat, np.arange(more.total))
    check_advances(more, [*taken, *rest])


@EXAMPLES
@given(lines(), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_samples_resume_anywhere(line: Line, sizes: list[int]) -> None:
    """Without packing each item is a sample. All are read once and in order, and after every cursor the rest."""
    sampler = Sampler(line.samples(Cursor()))
    seen = 0
    taken: list[Taken] = []
    while not sampler.exhausted:
        taken.append(take(sampler, sizes[len(taken) % len(sizes)]))
        seen += taken[-1].count
        if seen < line.total:
            again = Sampler(line.samples(sampler.cursor), start=sampler.cursor)
            assert not again.exhausted
            assert take(again, 1).columns["x"].tolist() == [seen]
    assert np.concatenate([np.zeros(0), *(s.columns["x"] for s in taken if s.count)]).tolist() == list(
        range(line.total)
    )
    assert all(s.columns["pair"].shape == (s.count, 2) for s in taken if s.count)
    check_advances(line, taken)
    other = Sampler(line.samples(Cursor()))
    assert take(other, seen, lay_out=False).count == line.total
    assert other.exhausted
    assert other.cursor == sampler.cursor


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
        (Cursor(0, 0, 0, 1), "4 items of the row at position 1"),
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
