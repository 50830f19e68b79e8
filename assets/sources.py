"""Real input as assets: the documents, and their tokens."""

import dagster as dg

from assets.failures import OWNERS
from assets.resources import LakehouseResource
from dlac_pipeline.spec.job_spec import home_folder

LEFT_OUT = ("test", "tests", "idle_test", "encodings", "pydoc_data", "idlelib", "lib2to3", "distutils")
"""Folders of the standard library that the demo does not train on: tests, tables and tools, 70 % of its sources."""


@dg.asset(
    group_name="sources",
    kinds={"python", "iceberg"},
    owners=OWNERS,
    tags={"dlac/stage": "source"},
    description="One row per Python source file of the interpreter's standard library, in three appends.",
)
def corpus(context: dg.AssetExecutionContext, lakehouse: LakehouseResource) -> dg.MaterializeResult[None]:
    """Ingest the documents."""
    from dlac_pipeline.ingest.corpus import ingest_stdlib_corpus

    report = ingest_stdlib_corpus(lakehouse.lakehouse(), leave_out=LEFT_OUT)
    context.log.info(f"{report.documents} documents, {report.appended_documents} of them appended now")
    return dg.MaterializeResult(
        metadata={
            "table": report.identifier,
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
    from dlac_pipeline.ingest.tokens import tokenize_corpus

    report = tokenize_corpus(lakehouse.lakehouse(), tokenizer_path=home_folder() / "tokenizer.json")
    context.log.info(f"{report.sequences} sequences, {report.tokens} tokens")
    return dg.MaterializeResult(
        metadata={
            "table": report.identifier,
            "dagster/row_count": report.sequences,
            "tokens": report.tokens,
            "sequence_length": report.sequence_length,
            "vocab_size": report.vocab_size,
            "tokenizer_digest": report.tokenizer_digest,
        }
    )
