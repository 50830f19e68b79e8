"""Rows of DLAC's own tables as Arrow.

pyiceberg reads each manifest again for each scan, and converts the schema and the filter again for each data file, in Python.
Own tables have many small files, their columns keep their names, and rows are removed with their files. So a manifest is read
once, and one Arrow dataset reads the files.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from itertools import islice
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, EqualTo
from pyiceberg.expressions.visitors import bind
from pyiceberg.io.pyarrow import expression_to_pyarrow, schema_to_pyarrow
from pyiceberg.manifest import DataFile, ManifestContent, ManifestFile
from pyiceberg.table import Table
from pyiceberg.utils.concurrent import ExecutorFactory

_OPEN_FILES = 256
_MANIFESTS = 4096
_FORMAT = ds.ParquetFileFormat()
_FILES: dict[str, list[DataFile]] = {}
"""The data files of manifests, which never change, by path. The first ones are forgotten first."""


def read_rows(table: Table, row_filter: BooleanExpression, *, columns: Sequence[str] = ("*",)) -> pa.Table:
    """Return the rows of an own table that a filter selects, in the order of its data files.

    Only files of one run are opened if the filter is a condition on `run`, or an `And` that begins with one.

    Raises:
        FileNotFoundError: upkeep has removed a file of this snapshot.
    """
    scan = table.scan(row_filter, selected_fields=tuple(columns))
    files = _data_files(table)
    if files is None:
        return scan.to_arrow()
    schema: Any = schema_to_pyarrow(table.schema(), include_field_ids=False)
    wanted: dict[str, Any] = {"columns": [field.name for field in scan.projection().fields]}
    if row_filter != AlwaysTrue():
        bound = bind(table.schema(), row_filter, case_sensitive=True)
        wanted["filter"] = expression_to_pyarrow(bound, table.schema())
    run = _run_in(row_filter)
    named = iter([each.file_path for each in files if run is None or _partition_of(each) in ([], [run])])
    parts = [schema.empty_table().select(wanted["columns"])]
    while paths := list(islice(named, _OPEN_FILES)):
        with ExitStack() as opened:
            streams = [opened.enter_context(table.io.new_input(path).open()) for path in paths]
            fragments = [_FORMAT.make_fragment(each) for each in streams]
            parts.append(ds.FileSystemDataset(fragments, schema, _FORMAT).to_table(**wanted))
    return pa.concat_tables(parts)


def _data_files(table: Table) -> list[DataFile] | None:
    """Return the data files of a table's current snapshot, or None if it has delete files."""
    snapshot = table.current_snapshot()
    manifests = [] if snapshot is None else snapshot.manifests(table.io)
    if any(each.content != ManifestContent.DATA for each in manifests):
        return None

    def read(manifest: ManifestFile) -> list[DataFile]:
        return [entry.data_file for entry in manifest.fetch_manifest_entry(table.io)]

    known = {each.manifest_path: _FILES[each.manifest_path] for each in manifests if each.manifest_path in _FILES}
    unread = [each for each in manifests if each.manifest_path not in known]
    found = map(read, unread) if len(unread) < 2 else ExecutorFactory.get_or_create().map(read, unread)
    known |= {each.manifest_path: files for each, files in zip(unread, found, strict=True)}
    _FILES.update(known)
    for path in list(_FILES)[:-_MANIFESTS]:
        _FILES.pop(path, None)
    return [file for each in manifests for file in known[each.manifest_path]]


def _partition_of(file: DataFile) -> list[Any]:
    return [file.partition[place] for place in range(len(file.partition))]


def _run_in(row_filter: BooleanExpression) -> str | None:
    """Return the run that the first condition of a filter names, or None."""
    while isinstance(row_filter, And):
        row_filter = row_filter.left
    if isinstance(row_filter, EqualTo) and getattr(row_filter.term, "name", "") == "run":
        return str(row_filter.literal.value)
    return None
