"""Ingestion of a corpus and of its tokens, over real SQLite catalogs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from examples.corpus.appends import COMPLETE_PROPERTY
from examples.corpus.corpus import ingest_stdlib_corpus
from examples.corpus.tokenizer import END_OF_DOCUMENT
from examples.corpus.tokens import TokensReport, tokenize_corpus

DOCUMENTS = 20
LENGTH = 16
ROWS_PER_ROW_GROUP = 8


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of Python sources: packages, an own encoding, a file that spells out the end-of-document token."""
    folder = tmp_path / "lib"
    (folder / "pkg").mkdir(parents=True)
    for number in range(DOCUMENTS - 4):
        (folder / "pkg" / f"m{number:02d}.py").write_text(f"def f{number}(x):\n    return x + {number}  # café\n" * 5)
    (folder / "alone.py").write_text("import os\n")
    (folder / "empty.py").write_text("")
    (folder / "latin.py").write_bytes("# -*- coding: latin-1 -*-\nname = 'é'\n".encode("latin-1"))
    (folder / "special.py").write_text(f"END = {END_OF_DOCUMENT!r}\n")
    return folder


@pytest.fixture
def lakehouse(tmp_path: Path) -> Lakehouse:
    """A lakehouse in the test's own folder."""
    return connect(LakehouseConfig().at_home(tmp_path / "home"))


def tokenize(
    lakehouse: Lakehouse, tmp_path: Path, *, tokens: str = "sources.tokens", sequence_length: int = LENGTH
) -> TokensReport:
    """Small sequences and row groups, so that a small corpus has many of both."""
    return tokenize_corpus(
        lakehouse,
        tokens=tokens,
        vocab_size=300,
        sequence_length=sequence_length,
        rows_per_row_group=ROWS_PER_ROW_GROUP,
        tokenizer_path=tmp_path / "tokenizer.json",
        sample_every=2,
    )


def column(lakehouse: Lakehouse, identifier: str, order_by: str, name: str) -> list[Any]:
    """One column of a table, in the order of another."""
    values: list[Any] = lakehouse.load(identifier).scan().to_arrow().sort_by(order_by)[name].to_pylist()
    return values


def token_line(lakehouse: Lakehouse) -> npt.NDArray[np.int64]:
    """All sequences end to end."""
    return np.concatenate([np.array(ids) for ids in column(lakehouse, "sources.tokens", "sequence_id", "tokens")])


def append_rows(lakehouse: Lakehouse, identifier: str) -> list[int]:
    """Rows that each append added, oldest first."""
    summaries = [snapshot.summary for snapshot in lakehouse.load(identifier).snapshots()]
    return [int(summary["added-records"] or 0) for summary in summaries if summary is not None]


def kill_after_first_append(tmp_path: Path, call: str) -> None:
    """Run one ingestion in a new process, which dies as soon as its first append has landed."""
    program = f"""
import os
from pathlib import Path
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.config import LakehouseConfig
from examples.corpus.corpus import ingest_stdlib_corpus
from examples.corpus.tokens import tokenize_corpus
tmp = Path({str(tmp_path)!r})
lakehouse = connect(LakehouseConfig().at_home(tmp / "home"))
die = lambda done, total: os._exit(9)
{call}
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 9


def test_corpus_arrives_in_three_appends(lakehouse: Lakehouse, root: Path) -> None:
    """Every source is one row, in order of paths, spread over three appends of a third each."""
    report = ingest_stdlib_corpus(lakehouse, root=root)
    assert (report.documents, report.appends) == (DOCUMENTS, 3)
    assert append_rows(lakehouse, "sources.stdlib") == [6, 7, 7]
    assert column(lakehouse, "sources.stdlib", "document_id", "document_id") == list(range(DOCUMENTS))
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    assert column(lakehouse, "sources.stdlib", "document_id", "path") == paths
    assert set(column(lakehouse, "sources.stdlib", "path", "package")) == {"alone", "empty", "latin", "pkg", "special"}


def test_corpus_decodes_each_file_by_its_own_declaration(lakehouse: Lakehouse, root: Path) -> None:
    """A Latin-1 file becomes the text that its author wrote, with the size of its UTF-8 form."""
    ingest_stdlib_corpus(lakehouse, root=root)
    rows = lakehouse.load("sources.stdlib").scan("path = 'latin.py'").to_arrow().to_pylist()
    assert rows[0]["source"] == "# -*- coding: latin-1 -*-\nname = 'é'\n"
    assert rows[0]["bytes"] == len(rows[0]["source"].encode())


def test_undecodable_files_are_counted_and_left_out(lakehouse: Lakehouse, root: Path) -> None:
    """Files that break their own encoding declaration, or whose text no table can hold, are named in the report."""
    (root / "bad_bytes.py").write_bytes(b"x = '\xff'\n")
    (root / "bad_name.py").write_bytes(b"# coding: no-such-codec\n")
    (root / "bad_surrogate.py").write_bytes(b"# coding: unicode_escape\nx = '\\ud800'\n")
    report = ingest_stdlib_corpus(lakehouse, root=root)
    assert report.undecodable == ("bad_bytes.py", "bad_name.py", "bad_surrogate.py")
    assert report.documents == DOCUMENTS


def test_killed_corpus_ingestion_continues(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """After a kill past the first append the next ingestion adds the rest: no document is lost or doubled."""
    kill_after_first_append(tmp_path, "ingest_stdlib_corpus(lakehouse, root=tmp / 'lib', progress=die)")
    assert append_rows(lakehouse, "sources.stdlib") == [6]
    assert COMPLETE_PROPERTY not in lakehouse.load("sources.stdlib").properties
    report = ingest_stdlib_corpus(lakehouse, root=root)
    assert (report.appends, report.appended_documents) == (2, 14)
    assert append_rows(lakehouse, "sources.stdlib") == [6, 7, 7]
    assert column(lakehouse, "sources.stdlib", "document_id", "document_id") == list(range(DOCUMENTS))


def test_tokens_decode_back_to_the_sources(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """All sequences end to end are the documents with an end token after each, then padding, and nothing else."""
    ingest_stdlib_corpus(lakehouse, root=root)
    report = tokenize(lakehouse, tmp_path)
    line = token_line(lakehouse)
    assert len(line) == report.sequences * LENGTH == report.tokens + report.padding_tokens
    assert report.padding_tokens < LENGTH
    tokenizer = Tokenizer.from_file(str(report.tokenizer_path))
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert (line[report.tokens :] == end).all()
    *documents, rest = np.split(line[: report.tokens], np.flatnonzero(line[: report.tokens] == end) + 1)
    assert len(rest) == 0
    sources = column(lakehouse, "sources.stdlib", "document_id", "source")
    assert [tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) for ids in documents] == sources


def test_tokens_are_written_once(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """A second call appends nothing; a lost tokenizer file is made again, the same as before."""
    ingest_stdlib_corpus(lakehouse, root=root)
    first = tokenize(lakehouse, tmp_path)
    content = first.tokenizer_path.read_bytes()
    first.tokenizer_path.unlink()
    again = tokenize(lakehouse, tmp_path)
    assert (again.appends, again.appended_sequences, again.sequences) == (0, 0, first.sequences)
    assert again.tokenizer_path.read_bytes() == content
    assert len(append_rows(lakehouse, "sources.tokens")) == 3


def test_killed_tokenization_continues(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """After a kill past the first append the next call adds the rest, and the table equals an undisturbed one."""
    ingest_stdlib_corpus(lakehouse, root=root)
    kill_after_first_append(
        tmp_path,
        "tokenize_corpus(lakehouse, tokenizer_path=tmp / 'tokenizer.json', vocab_size=300, "
        f"sequence_length={LENGTH}, rows_per_row_group={ROWS_PER_ROW_GROUP}, sample_every=2, progress=die)",
    )
    assert tokenize(lakehouse, tmp_path).appends == 2
    undisturbed = tokenize(lakehouse, tmp_path, tokens="sources.undisturbed")
    assert undisturbed.appends == 3
    for name in ("sequence_id", "tokens", "first_document"):
        found = column(lakehouse, "sources.tokens", "sequence_id", name)
        assert found == column(lakehouse, "sources.undisturbed", "sequence_id", name)
