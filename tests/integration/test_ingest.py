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
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.iceberg.row_groups import row_groups_of
from examples.corpus.appends import COMPLETE_PROPERTY
from examples.corpus.corpus import CorpusReport, ingest_stdlib_corpus
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


def test_installed_packages_and_caches_are_no_stdlib(lakehouse: Lakehouse, root: Path) -> None:
    """Files in site-packages, dist-packages or __pycache__ are not ingested."""
    for name in ("site-packages", "pkg/dist-packages", "__pycache__"):
        (root / name).mkdir()
        (root / name / "other.py").write_text("x = 1\n")
    assert ingest_stdlib_corpus(lakehouse, root=root).documents == DOCUMENTS


def test_named_folders_are_left_out(lakehouse: Lakehouse, root: Path) -> None:
    """A folder of one of the names is left out at any depth. A file of that name is ingested."""
    for name in ("test", "pkg/tests"):
        (root / name).mkdir()
        (root / name / "other.py").write_text("x = 1\n")
    (root / "test.py").write_text("x = 1\n")
    report = ingest_stdlib_corpus(lakehouse, root=root, leave_out=("test", "tests"))
    assert report.documents == DOCUMENTS + 1


def test_corpus_is_ingested_once(lakehouse: Lakehouse, root: Path) -> None:
    """A second ingestion of the same sources appends nothing and reports it."""
    first = ingest_stdlib_corpus(lakehouse, root=root)
    again = ingest_stdlib_corpus(lakehouse, root=root)
    assert (again.appends, again.appended_documents, again.digest) == (0, 0, first.digest)
    assert len(append_rows(lakehouse, "sources.stdlib")) == 3


def test_another_corpus_is_refused(lakehouse: Lakehouse, root: Path) -> None:
    """Other sources never mix with those in the table."""
    ingest_stdlib_corpus(lakehouse, root=root)
    (root / "new.py").write_text("x = 1\n")
    with pytest.raises(SpecInvalid, match="name another table"):
        ingest_stdlib_corpus(lakehouse, root=root)
    assert sum(append_rows(lakehouse, "sources.stdlib")) == DOCUMENTS


def test_killed_corpus_ingestion_continues(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """After a kill past the first append the next ingestion adds the rest: no document is lost or doubled."""
    kill_after_first_append(tmp_path, "ingest_stdlib_corpus(lakehouse, root=tmp / 'lib', progress=die)")
    assert append_rows(lakehouse, "sources.stdlib") == [6]
    assert COMPLETE_PROPERTY not in lakehouse.load("sources.stdlib").properties
    report = ingest_stdlib_corpus(lakehouse, root=root)
    assert (report.appends, report.appended_documents) == (2, 14)
    assert append_rows(lakehouse, "sources.stdlib") == [6, 7, 7]
    assert column(lakehouse, "sources.stdlib", "document_id", "document_id") == list(range(DOCUMENTS))


def test_two_ingestions_at_once_share_the_work(lakehouse: Lakehouse, root: Path) -> None:
    """If an ingestion starts inside another, after its first append, every document is ingested once."""
    reports: list[CorpusReport] = []

    def start_another(done: int, total: int) -> None:
        if not reports:
            reports.append(ingest_stdlib_corpus(lakehouse, root=root))

    ingest_stdlib_corpus(lakehouse, root=root, progress=start_another)
    assert reports[0].appends == 2
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


def test_first_document_owns_the_first_token(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """The number of ends before a sequence is the id of the document that it starts in."""
    ingest_stdlib_corpus(lakehouse, root=root)
    report = tokenize(lakehouse, tmp_path)
    line = token_line(lakehouse)
    end = Tokenizer.from_file(str(report.tokenizer_path)).token_to_id(END_OF_DOCUMENT)
    ends_before = [int((line[:start] == end).sum()) for start in range(0, len(line), LENGTH)]
    assert column(lakehouse, "sources.tokens", "sequence_id", "first_document") == ends_before


def test_row_groups_keep_the_limit(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """No row group is larger than asked for, and only the last one of a data file is smaller."""
    ingest_stdlib_corpus(lakehouse, root=root)
    tokenize(lakehouse, tmp_path)
    table = lakehouse.load("sources.tokens")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    groups = row_groups_of(table, snapshot.snapshot_id, "")
    assert len(append_rows(lakehouse, "sources.tokens")) == 3
    assert max(group.rows for group in groups) == ROWS_PER_ROW_GROUP
    smaller = [group.file_path for group in groups if group.rows < ROWS_PER_ROW_GROUP]
    assert len(smaller) == len(set(smaller)) < len(groups)


def test_statistics_cover_ids_only(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """A filter on sequence_id can skip data files, and manifests do not carry bounds of tokens."""
    ingest_stdlib_corpus(lakehouse, root=root)
    tokenize(lakehouse, tmp_path)
    table = lakehouse.load("sources.tokens")
    wanted = {table.schema().find_field(name).field_id for name in ("sequence_id", "first_document")}
    for task in table.scan().plan_files():
        assert set(task.file.lower_bounds or {}) == set(task.file.value_counts or {}) == wanted


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


def test_other_settings_are_refused(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """Sequences of another length never mix with those in the table."""
    ingest_stdlib_corpus(lakehouse, root=root)
    tokenize(lakehouse, tmp_path)
    with pytest.raises(SpecInvalid, match="name another table"):
        tokenize(lakehouse, tmp_path, sequence_length=2 * LENGTH)


def test_tokens_of_an_incomplete_corpus_are_refused(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """A corpus that was killed half-way is not tokenized."""
    kill_after_first_append(tmp_path, "ingest_stdlib_corpus(lakehouse, root=tmp / 'lib', progress=die)")
    with pytest.raises(SpecInvalid, match="complete corpus"):
        tokenize(lakehouse, tmp_path)


def test_another_tokenizer_file_is_not_overwritten(lakehouse: Lakehouse, root: Path, tmp_path: Path) -> None:
    """A file that some other table may need stays as it is."""
    ingest_stdlib_corpus(lakehouse, root=root)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(SpecInvalid, match="name another path"):
        tokenize(lakehouse, tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"
