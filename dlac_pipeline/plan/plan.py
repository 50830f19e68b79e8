"""Plans that are written: a plan's row and work units, and the plans that a process has read, each once."""

import json
import logging
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from dlac_pipeline.lakehouse.errors import DlacError
from dlac_pipeline.lakehouse.iceberg.columns import concat_chunks
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.iceberg.pins import release_pins
from dlac_pipeline.lakehouse.iceberg.snapshots import check_pinned
from dlac_pipeline.lakehouse.iceberg.sources import check_data_files, check_files_exist
from dlac_pipeline.lakehouse.ledger.plans import PlanRow, find_plan, get_plan, read_units
from dlac_pipeline.lakehouse.source_names import split_identifier
from dlac_pipeline.plan.units import Ints, UnitTable
from dlac_pipeline.spec.job_spec import SourceSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A plan and its units."""

    row: PlanRow
    units: UnitTable

    @property
    def id(self) -> str:
        """Content id of the plan."""
        return self.row.plan_id

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that become tensors."""
        return tuple(json.loads(self.row.columns))


class Plans:
    """Plans of a lakehouse, for one process. A plan never changes, so each is read once.

    Its table and its pin may change: they are checked whenever the plan is used for reading rows.
    """

    def __init__(self, lakehouse: Lakehouse) -> None:
        self.lakehouse = lakehouse
        self._rows: dict[str, PlanRow] = {}
        self._plans: dict[str, Plan] = {}

    def add(self, plan: Plan) -> Plan:
        """Remember a plan that this process has made, and return it."""
        self._rows[plan.id] = plan.row
        return self._plans.setdefault(plan.id, plan)

    def keep(self, plan_ids: Collection[str]) -> None:
        """Forget all plans but these. A run that streams reads a few of very many."""
        self._rows = {each: row for each, row in self._rows.items() if each in plan_ids}
        self._plans = {each: plan for each, plan in self._plans.items() if each in plan_ids}

    def find_row(self, plan_id: str) -> PlanRow | None:
        """Return the row of a plan, or None if no such plan was written."""
        found = self._rows.get(plan_id) or find_plan(self.lakehouse, plan_id)
        if found is not None:
            self._rows[plan_id] = found
        return found

    def row(self, plan_id: str) -> PlanRow:
        """Return the row of a plan. Raises `SpecInvalid` if no such plan was written."""
        return self.find_row(plan_id) or get_plan(self.lakehouse, plan_id)

    def check(self, plan_id: str, *, table: str | None = None) -> PlanRow:
        """Return the row of a plan whose table (perhaps renamed) and pin still exist. Raises as `row` and `check_pinned`."""
        row = self.row(plan_id)
        name = table or row.source_table
        check_pinned(self.lakehouse, name, table_uuid=row.table_uuid, snapshot_id=row.snapshot_id, tag=row.tag)
        return row

    def release_old_pins(self, run: str, tables: Iterable[str]) -> None:
        """Release the pins of earlier legs of a run. A failure is left to the next launch, because all rows were committed."""
        for table in tables:
            try:
                release_pins(self.lakehouse, run, table)
            except (DlacError, OSError) as err:
                _log.warning("expected to release pins that no run needs, found %s; the next launch tries again", err)

    def check_files(self, plan_ids: Iterable[str], *, table: str) -> None:
        """Check the data files of plans, if no pin protects them.

        Raises:
            PinLost: files of a table of another format are gone.
            DataFileChanged: a registered Parquet file has changed.
        """
        if split_identifier(table) is None:
            check_data_files(self.lakehouse.load(table))
            return
        for plan in [self.load(each, table=table) for each in plan_ids]:
            check_files_exist(self.lakehouse, table, plan.row.snapshot_id, plan.units.file_paths)

    def load(self, plan_id: str, *, table: str | None = None) -> Plan:
        """Return a plan with its units, after the checks of `check`."""
        self.check(plan_id, table=table)
        return self.read(plan_id)

    def read(self, plan_id: str) -> Plan:
        """Return a plan with its units, whether or not its table and pin still exist.

        Raises `SpecInvalid` if no such plan was written.
        """
        found = self._plans.get(plan_id)
        if found is None:  # returned as it is, because another thread may forget it
            row = self.row(plan_id)
            found = self._plans[plan_id] = Plan(row=row, units=unit_table(read_units(self.lakehouse, row)))
        return found


def is_plan_of(source: SourceSpec, row: PlanRow) -> bool:
    """Return whether a plan is of the table, rows and columns that a source requests."""
    return (
        (row.source_table, row.row_filter) == (source.table, source.planned_filter)
        and json.loads(row.columns) == source.columns
        and json.loads(row.exclude) == source.exclude
        and source.snapshot_id in (None, row.snapshot_id)
    )


def unit_table(units: pa.Table) -> UnitTable:
    """Return the rows of `work_units` of one plan, in order of `unit`, as columns."""
    dictionary = units["file_path"].combine_chunks().dictionary_encode()
    if isinstance(dictionary, pa.ChunkedArray):
        dictionary = dictionary.combine_chunks()
    lists = concat_chunks(units["dead"].chunks, units["dead"].type)
    ends, first, rows = lists.offsets.to_numpy(), *(lists.values.field(name).to_numpy() for name in ("first", "rows"))
    dead = {
        index: _offsets_of(first[ends[index] : ends[index + 1]], rows[ends[index] : ends[index + 1]])
        for index in np.flatnonzero(units["live_rows"].to_numpy() < units["rows"].to_numpy()).tolist()
    }
    return UnitTable(
        file_paths=dictionary.dictionary.to_pylist(),
        file=dictionary.indices.to_numpy().astype(np.int64),
        row_group=units["row_group"].to_numpy().astype(np.int64),
        first_row=units["first_row"].to_numpy(),
        rows=units["rows"].to_numpy(),
        dead=dead,
        bytes=units["bytes"].to_numpy(),
    )


def _offsets_of(first: Ints, rows: Ints) -> Ints:
    """Return the offsets in runs that begin at `first` and have so many rows, int64."""
    ends = np.cumsum(rows)
    return (np.repeat(first - ends + rows, rows) + np.arange(ends[-1])).astype(np.int64, copy=False)
