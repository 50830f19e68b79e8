"""Row groups of a pinned snapshot: the planned rows, and the rows that deletes, a filter or exclusions make dead.

Each footer is read once, in background threads. A filter is decided as early as possible: for a file by partition and
metrics, for a row group by its statistics. Only if those leave it undecided, the filter's columns are read.
"""

from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import IcebergType

from dlac_pipeline.lakehouse.errors import NoSuchColumn, SpecInvalid, UnsupportedColumn
from dlac_pipeline.lakehouse.files.file_format import Bounds, Footer
from dlac_pipeline.lakehouse.files.open_file import OpenFile, open_file
from dlac_pipeline.lakehouse.filters.conditions import Condition, Constant, combine
from dlac_pipeline.lakehouse.filters.facts import Facts, of_counts
from dlac_pipeline.lakehouse.filters.grammar import filter_names, parse_filter
from dlac_pipeline.lakehouse.filters.literals import from_arrow
from dlac_pipeline.lakehouse.iceberg.columns import FileColumns, expect, name_mapping_of
from dlac_pipeline.lakehouse.iceberg.data_files import LiveFile, live_files, snapshot_schema
from dlac_pipeline.lakehouse.iceberg.deletes import NO_ROWS, Deletes

_THREADS = 4
_LOST = "restore the file, delete it from the table, or plan another snapshot: on_unreadable applies to files that are planned"


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """A row group of a data file. `dead` contains the sorted offsets of the rows that are not read."""

    file_path: str
    row_group: int
    first_row: int
    rows: int
    bytes: int
    dead: npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesToRead:
    """Data files of a snapshot, by default all of them."""

    only: Collection[str] | None = None
    """Paths of the files."""
    progress: Callable[[int, int], None] = lambda done, total: None
    """Called after each file, with the number of files that are read, and the number of all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChecks:
    """Columns whose content must fit in the rows that are read. Footers may show that it does not."""

    without_nulls: Sequence[str] = ()
    of_one_length: Sequence[str] = ()
    """Columns of `without_nulls` whose lists have one length."""


NO_CHECKS = ColumnChecks()


def parse_exclusion(text: str, schema: Schema, table: Table) -> tuple[Schema, Condition]:
    """Return the condition in `text`, and the columns that it uses under their names in the text.

    Where `schema` lacks a name, the newest schema of the table that has them all decides which columns are meant. A renamed
    column is still found by its field id, and a later column is null in older files. Raises `NoSuchColumn` if no schema has
    them all, or `SpecInvalid` for a blank text, no filter, or an incomparable literal.
    """
    if not text.strip():
        raise SpecInvalid(
            f"expected rows to exclude, such as \"lang = 'en'\", found the blank {text!r}: leave the exclusion out, or name "
            f"rows by the columns {filter_names(schema)!r}"
        )
    try:
        return schema, parse_filter(text, schema)
    except NoSuchColumn:
        now = {found.field_id: found for found in schema.fields}
        for other in sorted(table.schemas().values(), key=lambda known: known.schema_id, reverse=True):
            renamed = (now.get(each.field_id, each).model_copy(update={"name": each.name}) for each in other.fields)
            for names in (Schema(*renamed), other):  # fields inside of a struct may have been renamed, too
                with suppress(NoSuchColumn):
                    return names, parse_filter(text, names)
        raise


def row_groups_of(
    table: Table,
    snapshot_id: int,
    row_filter: str,
    *,
    schema: Schema | None = None,
    reads: FilesToRead = FilesToRead(),
    exclude: Sequence[str] = (),
    checks: ColumnChecks = NO_CHECKS,
) -> list[RowGroup]:
    """Return all row groups of a snapshot but for files that the filter excludes whole, sorted by file path and row group.

    A row is dead if a delete names it, if the filter is not true for it, or if one of `exclude` is. Exclusions do not change
    the list of row groups, and may name columns as another schema of the table does (see `parse_exclusion`). `schema` names
    the columns, by default the snapshot's own. `checks` are compared with the footers.

    Raises `NoSuchSnapshot`, `SpecInvalid` or `NoSuchColumn` for a request that does not fit the table, `DataFileUnreadable`,
    and `UnsupportedDeletes` or `UnsupportedColumn` for data that cannot be read exactly, or that surely fails `checks`.
    """
    schema = schema or snapshot_schema(table, snapshot_id)
    wanted = parse_filter(row_filter, schema)
    files = live_files(table, snapshot_id, wanted, schema=schema)
    files = [file for file in files if reads.only is None or file.path in reads.only]
    parsed = [parse_exclusion(text, schema, table) for text in exclude]
    own = combine(False, [condition for names, condition in parsed if names is schema])  # all of them as one condition
    excluded = [(schema, own), *(each for each in parsed if each[0] is not schema)]
    planner = _Planner(table, schema, excluded, checks)
    groups: list[RowGroup] = []
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="footer") as pool:
        for done, found in enumerate(pool.map(planner.row_groups, files), start=1):
            groups.extend(found)
            reads.progress(done, len(files))
    return groups


class _Planner:
    """Row groups of data files, one file at a time, in any thread."""

    def __init__(
        self, table: Table, schema: Schema, excluded: Sequence[tuple[Schema, Condition]], checks: ColumnChecks
    ) -> None:
        self._io = table.io
        self._schema = schema
        self._mapping = name_mapping_of(table)
        self._deletes = Deletes(table, schema)
        self._excluded = excluded
        self._checks = checks

    def row_groups(self, file: LiveFile) -> list[RowGroup]:
        try:
            with expect(f"a data file at {file.path!r}", _LOST), self._io.new_input(file.path).open() as stream:
                return self._of_file(file, open_file(file.path, stream, self._schema.fields))
        except (NoSuchColumn, UnsupportedColumn) as err:
            raise type(err)(f"{err} (data file {file.path!r})") from err

    def _of_file(self, file: LiveFile, opened: OpenFile) -> list[RowGroup]:
        deleted, footer = self._deletes.dead_rows(file, opened), opened.footer
        wanted = self._in_file(file, opened, self._schema, file.residual)
        excluded = [self._in_file(file, opened, names, condition) for names, condition in self._excluded]
        of_file = footer.schema, self._schema, self._checks.without_nulls, self._mapping, file.partition_values
        whole = FileColumns.of(*of_file)
        groups, first_row = [], 0
        for index, rows in enumerate(footer.rows):
            start, end = np.searchsorted(deleted, (first_row, first_row + rows))
            dead = _dead_rows(index, deleted[start:end] - first_row, rows, wanted, excluded)
            _check_nulls(whole, footer, index, len(dead))
            if rows and not len(dead):
                _check_lengths(whole, footer, index, self._checks.of_one_length)
            groups.append(
                RowGroup(
                    file_path=file.path,
                    row_group=index,
                    first_row=first_row,
                    rows=rows,
                    bytes=footer.bytes_of(index),
                    dead=dead,
                )
            )
            first_row += rows
        return groups

    def _in_file(self, file: LiveFile, opened: OpenFile, schema: Schema, condition: Condition) -> "_InFile":
        of_file = opened.footer.schema, schema, condition.columns, self._mapping, file.partition_values
        return _InFile(condition, opened, FileColumns.of(*of_file))


@dataclass(frozen=True, slots=True)
class _InFile:
    """A condition on the rows of one file."""

    condition: Condition
    opened: OpenFile
    columns: FileColumns

    def is_true(self, row_group: int) -> bool | npt.NDArray[np.bool_]:
        """Return the rows of a row group for which the condition is true. They are read only if the statistics do not decide."""
        rows = self.opened.footer.rows[row_group]
        bounds = self.columns.bounds(self.opened.footer, row_group)
        known = {
            path.field_id: _facts(path.kind, rows, bounds[path.name])
            for path in self.condition.paths
            if len(path.fields) == 1 and path.name in bounds
        }
        decided = self.condition.simplify(known)
        if isinstance(decided, Constant):
            return decided.value
        read = self.opened.read(row_group, self.columns.in_file)
        return self.condition.true_rows(self.columns.align(read, rows))


def _facts(kind: IcebergType, rows: int, bounds: Bounds) -> Facts:
    lower, upper = (None if one is None else from_arrow(kind, one) for one in (bounds.lower, bounds.upper))
    return of_counts(kind, rows=rows, nulls=bounds.nulls, lower=lower, upper=upper)


def _check_nulls(columns: FileColumns, footer: Footer, index: int, dead: int) -> None:
    """Raise `UnsupportedColumn` if a row that is read is surely null: there are more nulls than dead rows."""
    for name, nulls in columns.nulls(footer, index).items():
        if nulls > dead:
            raise UnsupportedColumn(
                f"expected no nulls in column {name!r}, found {nulls} among the {footer.rows[index]} rows of row group {index}, "
                f'of which {dead} are not read: declare it nullable = ["{name}"], or filter them out with row_filter = '
                f'"{name} IS NOT NULL"'
            )


def _check_lengths(columns: FileColumns, footer: Footer, index: int, names: Sequence[str]) -> None:
    """Raise `UnsupportedColumn` if the lists of a row group surely have several lengths."""
    for name, values in columns.values_in_lists(footer, index).items():
        if name in names and values % footer.rows[index]:
            raise UnsupportedColumn(
                f"expected lists of one length in column {name!r}, found {values} values in the {footer.rows[index]} rows of row "
                f'group {index}: pack them with [sequences], or declare them ragged = ["{name}"]'
            )


def _dead_rows(
    index: int, deleted: npt.NDArray[np.int64], rows: int, wanted: _InFile, excluded: Sequence[_InFile]
) -> npt.NDArray[np.int64]:
    dead = np.zeros(rows, dtype=np.bool_)
    dead[deleted] = True
    if not dead.all():
        dead |= np.logical_not(wanted.is_true(index))
    for each in excluded:
        if not dead.all():
            dead |= each.is_true(index)
    return np.flatnonzero(dead) if dead.any() else NO_ROWS
