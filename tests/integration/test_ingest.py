"""Ingestion of a corpus and of its tokens, over real SQLite catalogs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from examples.corpus.corpus import ingest_stdlib_corpus
from examples.corpus.tokenizer import END_OF_DOCUMENT
from examples.corpus.tokens import tokenize_corpus

DOCUMENTS = 20
LENGTH = 16
SMALL = {"vocab_size": 300, "sequence_length": LENGTH, "rows_per_row_group": 8, "sample_every": 2}
"""Small sequences and row groups, so that a small corpus has many of both."""


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


def column(lakehouse: Lakehouse, identifier: str, order_by: str, name: str) -> list[Any]:
    """One column of a table, in the order of another."""
    values: list[Any] = lakehouse.load(identifier).scan().to_arrow().sort_by(order_by)[name].to_pylist()
    return values


def append_rows(lakehouse: Lakehouse, identifier: str) -> list[int]:
    """Rows that each append added, oldest first."""
    summaries = [snapshot.summary for snapshot in lakehouse.load(identifier).snapshots()]
    return [int(summary["added-records"] or 0) for summary in summaries if summary is not None]


def test_tokens_decode_back_to_the_sources(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """All sequences end to end are the documents with an end token after each, then padding. A second call adds nothing."""
    ingest_stdlib_corpus(lakehouse, root=root)
    options: dict[str, Any] = {**SMALL, "tokenizer_path": tmp_path / "tokenizer.json"}
    report = tokenize_corpus(lakehouse, **options)
    line = np.concatenate([np.array(ids) for ids in column(lakehouse, "sources.tokens", "sequence_id", "tokens")])
    assert len(line) == report.sequences * LENGTH == report.tokens + report.padding_tokens
    assert report.padding_tokens < LENGTH
    tokenizer = Tokenizer.from_file(str(report.tokenizer_path))
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    assert (line[report.tokens :] == end).all()
    *documents, rest = np.split(line[: report.tokens], np.flatnonzero(line[: report.tokens] == end) + 1)
    assert len(rest) == 0
    sources = column(lakehouse, "sources.stdlib", "document_id", "source")
    assert [tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) for ids in documents] == sources
    content = report.tokenizer_path.read_bytes()
    report.tokenizer_path.unlink()
    again = tokenize_corpus(lakehouse, **options)
    assert (again.appends, again.appended_sequences, again.sequences) == (0, 0, report.sequences)
    assert again.tokenizer_path.read_bytes() == content
    assert len(append_rows(lakehouse, "sources.tokens")) == 3
