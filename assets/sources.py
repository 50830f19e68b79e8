"""Real input as assets: the documents, and their tokens."""

import dagster as dg

from dlac_pipeline.dagster.metadata import column_schema
from dlac_pipeline.dagster.resources import LakehouseResource
from dlac_pipeline.lakehouse.config import home_folder

OWNERS = ["team:ml-platform"]
"""Owners on the asset pages: those who run the lakehouse."""
LEFT_OUT = ("test", "tests", "idle_test", "encodings", "pydoc_data", "idlelib", "lib2to3", "distutils")
"""Folders of the standard library that the demo does not train on: tests, tables and tools, most of its sources."""


@dg.asset(
    group_name="sources",
    kinds={"python", "iceberg"},
    owners=OWNERS,
    tags={"dlac/stage": "source"},
    description="One row per Python source file of the interpreter's standard library, in three appends.",
)
def corpus(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> dg.MaterializeResult[None]:
    """Ingest the documents."""
    from catalog.tables import STDLIB
    from examples.corpus.corpus import ingest_stdlib_corpus

    place = lakehouse.lakehouse()
    STDLIB.create(place)
    report = ingest_stdlib_corpus(place, STDLIB.name, leave_out=LEFT_OUT)
    context.log.info(f"{report.documents} documents, {report.appended_documents} of them appended now")
    return dg.MaterializeResult(
        metadata={
            "table": report.identifier,
            "dagster/column_schema": column_schema(STDLIB.schema),
            "dagster/row_count": report.documents,
            "source_bytes": report.source_bytes,
            "appends": report.appends,
            "undecodable_files": len(report.undecodable),
        }
    )


@dg.asset(
    deps=[corpus],
    group_name="sources",
    kinds={"python", "iceberg"},
    owners=OWNERS,
    tags={"dlac/stage": "source"},
    description="One row per fixed-length sequence of tokens; byte-level BPE trained on the corpus.",
)
def tokens(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> dg.MaterializeResult[None]:
    """Tokenize the corpus."""
    from catalog.tables import STDLIB, TOKENS
    from examples.corpus.tokens import tokenize_corpus

    place = lakehouse.lakehouse()
    TOKENS.create(place)
    tokenizer_path = home_folder() / "tokenizer.json"
    report = tokenize_corpus(place, corpus=STDLIB.name, tokens=TOKENS.name, tokenizer_path=tokenizer_path)
    context.log.info(f"{report.sequences} sequences, {report.tokens} tokens")
    return dg.MaterializeResult(
        metadata={
            "table": report.identifier,
            "dagster/column_schema": column_schema(TOKENS.schema),
            "dagster/row_count": report.sequences,
            **{name: getattr(report, name) for name in ("tokens", "sequence_length", "vocab_size", "tokenizer_digest")},
        }
    )
