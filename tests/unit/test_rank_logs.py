"""Logs of ranks: bounded while they grow, and shown without harm to a terminal."""

from pathlib import Path

import pytest

from dlac_pipeline.extensions.look.log_reader import LogReader
from dlac_pipeline.supervise.ranks import rank_logs
from dlac_pipeline.supervise.ranks.rank_logs import LogBound, cut_middle

BOUND = 2**20


def is_exact(folder: Path) -> bool:
    """Return whether the file system can remove the middle of a file."""
    file = folder / "scratch"
    file.write_bytes(b"a" * BOUND)
    with file.open("r+b") as stream:
        return rank_logs.collapse(stream.fileno(), 4096, 4096)


@pytest.mark.parametrize("collapses", [True, False])
def test_log_stays_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, collapses: bool) -> None:
    """The first and the very last line stay, on every file system, and a line in between reports how many are missing."""
    if not collapses:
        monkeypatch.setattr(rank_logs, "collapse", lambda *_: False)
    log = tmp_path / "rank-00000.log"
    bound = LogBound({0: log, 1: log.with_name("never-written")}, BOUND)
    with log.open("ab", buffering=0) as stream:
        for line in range(100_000):
            stream.write(b"line %09d %s\n" % (line, b"x" * 80))
        stream.write(b"ValueError: the end\n")
    bound.close()
    bound.close()
    raw = log.read_bytes()
    assert BOUND // 2 <= len(raw) <= BOUND
    lines = raw.split(b"\n")
    assert lines[0].startswith(b"line 000000000 ")
    assert not collapses or lines[-3].startswith(b"line 000099999 ")
    assert lines[-2] == b"ValueError: the end"
    (mark,) = [line for line in lines if line.startswith(b"[...")]
    assert b"the limit is 8 MiB" in mark
    if collapses and is_exact(tmp_path):
        ends = [int(line.split()[1]) for line in lines[lines.index(mark) + 2 : -2]]
        assert ends == list(range(ends[0], 100_000))


def test_endless_line_stays_bounded(tmp_path: Path) -> None:
    """A log without any newline is cut as well."""
    log = tmp_path / "rank-00000.log"
    log.write_bytes(b"a" * BOUND + b"b" * 30 * BOUND + b"ValueError: the end")
    LogBound({0: log}, BOUND).close()
    raw = log.read_bytes()
    assert len(raw) <= BOUND
    assert raw.startswith(b"a" * 1000)
    assert raw.endswith(b"ValueError: the end")
    assert cut_middle(log, 4 * BOUND) == 0


@pytest.mark.parametrize(
    ("written", "lines", "expected"),
    [
        (b"", 3, []),
        (b"a\nb\nc", 2, ["b", "c"]),
        (b"x" * 3 * 2**20 + b"\nb\n", 1, ["b"]),
        (b"a\n" * 3 * 2**20, 2, ["a", "a"]),
    ],
)
def test_last_lines_of_log(tmp_path: Path, written: bytes, lines: int | None, expected: list[str]) -> None:
    """Return the requested number of lines, with or without a final newline."""
    log = tmp_path / "log"
    log.write_bytes(written)
    reader = LogReader(log, lines=lines)
    assert [*reader.read(), *reader.rest()] == expected


def test_reader_follows_log(tmp_path: Path) -> None:
    """A line is read after its end. A log that was cut between two reads reports this, and is read from there."""
    log = tmp_path / "log"
    reader = LogReader(log)
    assert list(reader.read()) == []
    log.write_bytes(b"a\nb")
    assert list(reader.read()) == ["a"]
    with log.open("ab") as stream:
        stream.write(b"c\n")
    assert list(reader.read()) == ["bc"]
    log.write_bytes(b"x\n")
    (cut,) = reader.read()
    assert "removed" in cut
    with log.open("ab") as stream:
        stream.write(b"d\n")
    assert list(reader.read()) == ["d"]
