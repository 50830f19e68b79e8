"""The Python sources of the running interpreter's standard library as an Iceberg table, one document per row."""

from __future__ import annotations

import sysconfig
import tokenize
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import pyarrow as pa
from blake3 import blake3
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from dlac_pipeline.ingest.appends import Batchwise, Progress, append_batchwise
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse

CORPUS = Schema(
    NestedField(1, "document_id", LongType(), required=False),
    NestedField(2, "path", StringType(), required=False),
    NestedField(3, "package", StringType(), required=False),
    NestedField(4, "source", StringType(), required=False),
    NestedField(5, "bytes", LongType(), required=False),
)
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One source file: its path below the root, with forward slashes, and its decoded text."""

    path: str
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusReport:
    """The corpus, and what this call did."""

    identifier: str
    digest: str
    documents: int
    source_bytes: int
    """Size of all sources in UTF-8."""
    undecodable: tuple[str, ...]
    """Paths that were left out because they cannot be decoded: the standard library tests its decoder with them."""
    appends: int
    """Appends made by this call, or 0 if the table already had the corpus."""
    appended_documents: int


def ingest_stdlib_corpus(
    lakehouse: Lakehouse,
    identifier: str = "sources.stdlib",
    *,
    appends: int = 3,
    root: Path | None = None,
    leave_out: Collection[str] = (),
    progress: Progress | None = None,
) -> CorpusReport:
    """Ingest every Python source below `root` into the table `identifier`, exactly once.

    Args:
        lakehouse: Where the table is or will be.
        identifier: The table, as namespace.table. Created if it does not exist.
        appends: Number of commits over which the documents are spread.
        root: Folder of the sources, by default the standard library of the running interpreter with its tests.
        leave_out: Names of folders whose sources are left out.
        progress: Called after every append with (documents in the table, documents in all).

    Raises:
        SpecInvalid: no source exists, or the table contains something else.
    """
    documents, undecodable = _read(root or Path(sysconfig.get_path("stdlib")), leave_out)
    digest = corpus_digest(documents)
    content = Batchwise(
        digest=digest,
        schema=CORPUS,
        rows=len(documents),
        rows_of=lambda first, end: _to_arrow(documents[first:end], first),
    )
    appended = append_batchwise(lakehouse, identifier, content, appends=appends, progress=progress)
    return CorpusReport(
        identifier=identifier,
        digest=digest,
        documents=len(documents),
        source_bytes=sum(len(document.source.encode()) for document in documents),
        undecodable=undecodable,
        appends=appended.appends,
        appended_documents=appended.rows,
    )


def corpus_digest(documents: Sequence[Document]) -> str:
    """Return the digest of paths and sources in their order. Each is framed by its length, so that no two corpora collide."""
    digest = blake3()
    for document in documents:
        for text in (document.path.encode(), document.source.encode()):
            digest.update(len(text).to_bytes(8, "little"))
            digest.update(text)
    return digest.hexdigest()


def _read(root: Path, leave_out: Collection[str]) -> tuple[list[Document], tuple[str, ...]]:
    """Return all decodable documents below `root` in order of their paths, and the paths of the others."""
    documents, undecodable = [], []
    for relative in sorted(_source_paths(root, _NOT_STDLIB.union(leave_out))):
        source = _decoded(root / relative)
        if source is None:
            undecodable.append(relative)
        else:
            documents.append(Document(path=relative, source=source))
    if not documents:
        raise SpecInvalid(
            f"expected Python sources below {str(root)!r}, found {len(undecodable)} undecodable and no other: "
            "name a folder that holds .py files"
        )
    return documents, tuple(undecodable)


def _source_paths(root: Path, leave_out: frozenset[str]) -> Iterator[str]:
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        if path.is_file() and leave_out.isdisjoint(relative.parts):
            yield relative.as_posix()


def _decoded(path: Path) -> str | None:
    """Return the file's text by its own encoding declaration (PEP 263), or None if it violates it."""
    try:
        with tokenize.open(path) as stream:
            source = stream.read()
        source.encode()  # escapes may decode to lone surrogates, which no table can hold
    except (SyntaxError, UnicodeError):
        return None
    return source


def _to_arrow(documents: Sequence[Document], first_id: int) -> pa.Table:
    return pa.table(
        {
            "document_id": pa.array(range(first_id, first_id + len(documents)), pa.int64()),
            "path": [document.path for document in documents],
            "package": [PurePosixPath(document.path).parts[0].removesuffix(".py") for document in documents],
            "source": [document.source for document in documents],
            "bytes": pa.array([len(document.source.encode()) for document in documents], pa.int64()),
        }
    )
