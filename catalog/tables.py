"""Source tables of this project: their names, schemas and documentation. They are created if absent."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, ListType, LongType, NestedField, StringType

from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from examples.corpus.appends import create_source_table


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceTable:
    """Declaration of a source table: its name, as namespace.table, the documentation of a row, and its columns."""

    name: str
    comment: str
    schema: Schema
    properties: Mapping[str, str] = field(default_factory=dict)
    """Properties at creation, beside `comment`."""

    def create(self, lakehouse: Lakehouse) -> None:
        """Create the table unless it exists."""
        create_source_table(lakehouse, self.name, self.schema, {"comment": self.comment, **self.properties})


STDLIB = SourceTable(
    name="sources.stdlib",
    comment="One row per Python source file of the interpreter's standard library.",
    schema=Schema(
        NestedField(1, "document_id", LongType(), doc="Number of the document, from 0, in order of the paths."),
        NestedField(2, "path", StringType(), doc="Path below the root of the library."),
        NestedField(3, "package", StringType(), doc="First part of the path, without .py."),
        NestedField(4, "source", StringType(), doc="Text of the file."),
        NestedField(5, "bytes", LongType(), doc="Size of the text in UTF-8."),
    ),
)
TOKENS = SourceTable(
    name="sources.tokens",
    comment="One row per sequence of 128 tokens of the documents of sources.stdlib, in order of their numbers.",
    schema=Schema(
        NestedField(1, "sequence_id", LongType(), doc="Number of the sequence, from 0."),
        NestedField(2, "tokens", ListType(4, IntegerType(), element_required=False), doc="Ids of the tokens."),
        NestedField(3, "first_document", LongType(), doc="Number of the document with the first token."),
    ),
    properties={
        "write.parquet.row-group-limit": "256",
        "write.target-file-size-bytes": str(6 * 1024**2),
        "write.metadata.metrics.column.tokens": "none",
        "write.metadata.metrics.column.tokens.element": "none",
    },
)
TABLES = (STDLIB, TOKENS)
