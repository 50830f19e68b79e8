"""Rows of damaged tables: from intact files, from metadata files, and slices, which are computed again."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import FileSelector
from pyiceberg.exceptions import ValidationError
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.table import StaticTable, Table

from dlac_pipeline.lakehouse.errors import DlacError, TableDamaged
from dlac_pipeline.lakehouse.iceberg import own_rows
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.metadata_files import JOURNAL, metadata_files, resolve
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.plans import SLICES_ARROW
from dlac_pipeline.lakehouse.ledger.schemas import TABLES
from dlac_pipeline.lakehouse.ledger.typed_rows import LegRow
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.plan.slices import cut_id_of, slices_arrow

_T = TypeVar("_T")
_FORMAT = ds.ParquetFileFormat()
_CUT = ("run", "leg", "source", "pass", "cut_id")


def recorded_count(table: Table) -> int:
    """Return the number of rows that a table's current snapshot records."""
    snapshot = table.current_snapshot()
    summary = None if snapshot is None else snapshot.summary
    return int((summary and summary.additional_properties.get("total-records")) or 0)


def check_whole(table: Table) -> None:
    """Read each file of a table. Raises `TableDamaged` or `FileNotFoundError` if a file or rows are missing or altered."""
    files = own_rows.data_files(table, AlwaysTrue()) or []
    found = sum(len(own_rows.read_file(table, each)) for each in files)
    if found != recorded_count(table):
        raise TableDamaged(f"expected {recorded_count(table)} rows of table {table.name()[-1]!r}, found {found}")


def intact_rows(table: Table) -> pa.Table:
    """Return the rows in those files of a damaged table's snapshot that can be read."""
    schema = schema_to_pyarrow(table.schema(), include_field_ids=False)
    manifests = _read_or_none(lambda: own_rows.manifest_files(table)) or []
    files = [each for part in manifests for each in _read_or_none(part) or []]
    rows = (_read_or_none(lambda each=each: own_rows.read_file(table, each)) for each in files)  # type: ignore[misc]
    return pa.concat_tables([schema.empty_table(), *(each for each in rows if each is not None)])


def _read_or_none(read: Callable[[], _T]) -> _T | None:
    try:
        return read()
    except (TableDamaged, FileNotFoundError):
        return None


def rows_in_folder(name: str, location: str, io: FileIO) -> pa.Table:
    """Return the rows of all intact data files in a table's folder, also of such that no snapshot names, or names twice."""
    schema = schema_to_pyarrow(TABLES[name][0], include_field_ids=False)
    files, folder = resolve(io, f"{location}/data")
    parts = [schema.empty_table()]
    for info in files.get_file_info(FileSelector(folder, allow_not_found=True, recursive=True)):
        if info.path.endswith(".parquet") and not info.path.startswith(f"{folder}/{JOURNAL}/"):
            try:
                fragment = _FORMAT.make_fragment(info.path, files)
                if set(fragment.physical_schema.names) <= {*schema.names}:
                    parts.append(fragment.to_table(schema))
            except (pa.ArrowException, OSError):
                continue
    return pa.concat_tables(parts)


def parsed_tables(io: FileIO, location: str) -> Iterator[tuple[str, StaticTable]]:
    """Yield the metadata files of a table that can be read and have a snapshot, the newest version first."""
    for place in metadata_files(io, f"{location}/metadata"):
        try:
            found = StaticTable.from_metadata(place, io.properties)
        except (FileNotFoundError, ValueError, KeyError, ValidationError):
            continue
        if found.metadata.snapshots:
            yield place, found


def missing_slices(lakehouse: Lakehouse, *, known: pa.Table) -> tuple[pa.Table, list[str]]:
    """Compute the slices of the cuts that the ledger names and `known` lacks. Return them, and what cannot be computed."""
    named = lakehouse.read_own("consumption", columns=_CUT).group_by(list(_CUT)).aggregate([]).to_pylist()
    cuts, parts, problems = set(known["cut_id"].to_pylist()), [SLICES_ARROW.empty_table()], []
    by_run = defaultdict(list)
    for each in named:
        if each["cut_id"] is not None and each["cut_id"] not in cuts:
            by_run[each["run"]].append(each)
    plans = Plans(lakehouse)
    for run, wanted in by_run.items():
        legs = Ledger(lakehouse).rows(run, kinds=(LegRow,))
        for cut_id in dict.fromkeys(each["cut_id"] for each in wanted):
            uses = [each for each in wanted if each["cut_id"] == cut_id]
            rows = next(filter(None, (_slices_of(legs, each, plans) for each in uses)), None)
            if rows is None:
                problems.append(f"cut {cut_id} of run {run}")
            else:
                parts.append(rows)
    return pa.concat_tables(parts), problems


def _slices_of(legs: Sequence[LegRow], use: dict[str, object], plans: Plans) -> pa.Table | None:
    """Return the slices of a cut that an advance names. None: its leg or a plan is lost."""
    for row in reversed(legs):
        if row.leg != use["leg"]:
            continue
        try:
            leg = Leg.from_record(row.record)
            order = leg.order({each: plans.read(each).units for each in leg.plan_ids}).sources[int(str(use["source"]))]
            passed = int(str(use["pass"]))
            plan_id, cut = order.open_cut_of(passed).plan_id, order.cut_of(passed)
        except (DlacError, IndexError):
            continue
        if cut_id_of(plan_id, cut) == use["cut_id"]:
            return slices_arrow(str(use["cut_id"]), plan_id, cut)
    return None
