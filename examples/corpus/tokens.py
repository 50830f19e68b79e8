"""Tokens of the GPT example: a corpus table in, a table of token sequences of one length and the tokenizer's file out.

The documents in order of their ids, each followed by an end-of-document token, make one line of tokens. The line is cut into
sequences, and the last one is filled up with end-of-document tokens.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from blake3 import blake3
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import IntegerType, ListType, LongType, NestedField
from tokenizers import Tokenizer

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, reachable
from examples.corpus.appends import (
    ROWS_PROPERTY,
    Appended,
    Batchwise,
    Progress,
    append_batchwise,
    complete_digest,
    create_source_table,
    rows_there,
)
from examples.corpus.corpus import Document, corpus_digest
from examples.corpus.sequences import lay_out
from examples.corpus.tokenizer import load_corpus_tokenizer, save_tokenizer, tokenizer_digest, train_tokenizer

TOKENS = Schema(
    NestedField(1, "sequence_id", LongType(), required=False),
    NestedField(2, "tokens", ListType(4, IntegerType(), element_required=False), required=False),
    NestedField(3, "first_document", LongType(), required=False),
)
TOKENIZER_PROPERTY = "dlac.tokens.tokenizer"
"""Digest of the tokenizer's JSON file. Every append sets it."""
COUNT_PROPERTY = "dlac.tokens.count"
"""Tokens in all, without the filling of the last sequence. Every append sets it."""
_LAYOUT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensReport:
    """The table of sequences, and what this call did."""

    identifier: str
    tokenizer_path: Path
    tokenizer_digest: str
    vocab_size: int
    """Tokens that the tokenizer knows: fewer than asked for where the corpus is small."""
    sequence_length: int
    sequences: int
    tokens: int
    """All tokens of all documents, each with its end-of-document token."""
    padding_tokens: int
    """End-of-document tokens that fill up the last sequence."""
    appends: int
    """Appends made by this call, or 0 if the table already had all sequences."""
    appended_sequences: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Settings:
    """Everything that the table's content and its row groups follow from."""

    corpus_digest: str
    vocab_size: int
    sequence_length: int
    rows_per_row_group: int
    sample_every: int
    layout_version: int = _LAYOUT_VERSION

    def __post_init__(self) -> None:
        for name in ("sequence_length", "rows_per_row_group", "sample_every"):
            if getattr(self, name) < 1:
                raise SpecInvalid(f"expected {name} to be at least 1, found {getattr(self, name)!r}")

    @property
    def digest(self) -> str:
        return blake3(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def table_properties(self) -> dict[str, str]:
        return {
            "write.parquet.row-group-limit": str(self.rows_per_row_group),
            "write.target-file-size-bytes": str(6 * 1024**2),
            "write.metadata.metrics.column.tokens": "none",
            "write.metadata.metrics.column.tokens.element": "none",  # the name by which pyiceberg asks for a list
        }


def tokenize_corpus(
    lakehouse: Lakehouse,
    *,
    corpus: str = "sources.stdlib",
    tokens: str = "sources.tokens",
    vocab_size: int = 1024,
    sequence_length: int = 128,
    rows_per_row_group: int = 256,
    tokenizer_path: Path,
    appends: int = 3,
    sample_every: int = 4,
    progress: Progress | None = None,
) -> TokensReport:
    """Train a tokenizer on a sample of the corpus, and write the corpus into a table of token sequences, exactly once.

    Args:
        lakehouse: Where both tables are.
        corpus: The table that `ingest_stdlib_corpus` filled.
        tokens: The table to fill, as namespace.table. Created if it does not exist.
        vocab_size: Tokens to learn, the 256 bytes and the end of a document included.
        sequence_length: Tokens of every sequence.
        rows_per_row_group: Sequences in a Parquet row group.
        tokenizer_path: Where the tokenizer's JSON file is or will be.
        appends: Number of commits over which the sequences are spread.
        sample_every: The tokenizer is trained on documents 0, `sample_every`, 2 * `sample_every`, ...
        progress: Called after every append with (sequences in the table, sequences in all).

    Raises:
        SpecInvalid: the corpus is not complete, a setting is wrong, or table or file contain something else.
        NoSuchTable: the corpus does not exist.
    """
    source = lakehouse.load(corpus)
    settings = _Settings(
        corpus_digest=_complete(source, corpus),
        vocab_size=vocab_size,
        sequence_length=sequence_length,
        rows_per_row_group=rows_per_row_group,
        sample_every=sample_every,
    )
    create_source_table(lakehouse, tokens, TOKENS, settings.table_properties)
    table = lakehouse.load(tokens)
    rows_there(table, tokens, settings.digest)  # refuse a table that holds something else before a file is written
    done = complete_digest(table) == settings.digest
    tokenizer = load_corpus_tokenizer(tokenizer_path, table.properties.get(TOKENIZER_PROPERTY))
    documents = [] if done and tokenizer else _documents(lakehouse, source, settings.corpus_digest)
    if tokenizer is None:
        tokenizer = train_tokenizer(documents[::sample_every], vocab_size)
        _check_recorded(tokenizer, table, tokens)
        save_tokenizer(tokenizer, tokenizer_path)
    appended = Appended(appends=0, rows=0)
    if not done:
        content = _content(settings, tokenizer, documents)
        appended = append_batchwise(lakehouse, tokens, content, appends=appends, progress=progress)
    written = lakehouse.load(tokens).properties
    sequences, count = int(written[ROWS_PROPERTY]), int(written[COUNT_PROPERTY])
    return TokensReport(
        identifier=tokens,
        tokenizer_path=tokenizer_path,
        tokenizer_digest=tokenizer_digest(tokenizer),
        vocab_size=tokenizer.get_vocab_size(),
        sequence_length=sequence_length,
        sequences=sequences,
        tokens=count,
        padding_tokens=sequences * sequence_length - count,
        appends=appended.appends,
        appended_sequences=appended.rows,
    )


def _complete(source: Table, corpus: str) -> str:
    digest = complete_digest(source)
    if digest is None:
        raise SpecInvalid(
            f"expected table {corpus!r} to hold a complete corpus, found {source.properties.get(ROWS_PROPERTY, '0')!r} "
            "ingested documents and no end: ingest the corpus (again: it continues where it stopped), then its tokens"
        )
    return digest


def _documents(lakehouse: Lakehouse, source: Table, digest: str) -> list[str]:
    """Yield the sources in order of their ids, checked to be the ingested ones. Later rows are left out."""
    ingested = f"document_id < {int(source.properties[ROWS_PROPERTY])}"
    with reachable(lakehouse.config.uri):
        rows = source.scan(row_filter=ingested, selected_fields=("document_id", "path", "source")).to_arrow()
    rows = rows.sort_by("document_id")
    paths, sources = rows["path"].to_pylist(), rows["source"].to_pylist()
    found = corpus_digest([Document(path=path, source=text) for path, text in zip(paths, sources, strict=True)])
    if found != digest:
        name = ".".join(source.name())
        raise SpecInvalid(
            f"expected the corpus {digest!r} in table {name!r}, found documents with digest {found!r}: "
            "they were changed after the ingestion; ingest into a new table"
        )
    return list(sources)


def _check_recorded(tokenizer: Tokenizer, table: Table, tokens: str) -> None:
    recorded = table.properties.get(TOKENIZER_PROPERTY)
    if recorded is not None and recorded != tokenizer_digest(tokenizer):
        raise SpecInvalid(
            f"expected the tokenizer {recorded!r} that table {tokens!r} was written with, found that training gives "
            f"{tokenizer_digest(tokenizer)!r}: restore its file, or name another table"
        )


def _content(settings: _Settings, tokenizer: Tokenizer, documents: list[str]) -> Batchwise:
    sequences = lay_out(tokenizer, documents, settings.sequence_length)
    return Batchwise(
        digest=settings.digest,
        schema=TOKENS,
        rows=len(sequences.ids),
        rows_of=sequences.rows,
        table_properties=settings.table_properties,
        facts={TOKENIZER_PROPERTY: tokenizer_digest(tokenizer), COUNT_PROPERTY: str(sequences.tokens)},
    )
