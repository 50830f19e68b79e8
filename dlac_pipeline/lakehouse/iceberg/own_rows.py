"""Rows of DLAC's own tables as Arrow.

pyiceberg converts the schema and the filter again for each data file, in Python. Own tables have many small files, their
columns keep their names, and rows are removed with their files. So one Arrow dataset reads all files.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.expressions.visitors import bind
from pyiceberg.io.pyarrow import expression_to_pyarrow, schema_to_pyarrow
from pyiceberg.table import Table

_OPEN_FILES = 256
_FORMAT = ds.ParquetFileFormat()


def read_rows(table: Table, row_filter: BooleanExpression, *, columns: Sequence[str] = ("*",)) -> pa.Table:
    """Return the rows of an own table that a filter selects, in the order of its data files.

    Raises:
        FileNotFoundError: upkeep has removed a file of this snapshot.
    """
    scan = table.scan(row_filter, selected_fields=tuple(columns))
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    wanted: dict[str, Any] = {"columns": [field.name for field in scan.projection().fields]}
    if row_filter != AlwaysTrue():
        bound = bind(table.schema(), row_filter, case_sensitive=True)
        wanted["filter"] = expression_to_pyarrow(bound, table.schema())
    files = iter([task.file.file_path for task in scan.plan_files()])
    parts = [ds.dataset([], schema).to_table(columns=wanted["columns"])]
    while some := list(islice(files, _OPEN_FILES)):
        with ExitStack() as opened:
            streams = [opened.enter_context(table.io.new_input(path).open()) for path in some]
            parts.append(
                ds.FileSystemDataset([_FORMAT.make_fragment(each) for each in streams], schema, _FORMAT).to_table(
                    **wanted
                )
            )
    return pa.concat_tables(parts)
