"""Tables of plans, their work units, and the slices of their passes.

Units are written first under a write id. The plan row is last, and only if no process wrote the same plan since then. Readers
follow the plan row to its write id, so a crash or a race leaves no half or double plan.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial

import pyarrow as pa
from pyiceberg.expressions import BooleanExpression
from pyiceberg.io.pyarrow import schema_to_pyarrow

from dlac_pipeline.lakehouse.errors import FormatTooNew, LakehouseError, SpecInvalid
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, equals
from dlac_pipeline.lakehouse.ledger.schemas import FORMAT_VERSION, PLANS, SLICES, WORK_UNITS
from dlac_pipeline.lakehouse.maintenance.expiry import committing
from dlac_pipeline.lakehouse.retrying import retrying

WORK_UNITS_ARROW = schema_to_pyarrow(WORK_UNITS, include_field_ids=False)
SLICES_ARROW = schema_to_pyarrow(SLICES, include_field_ids=False)
_PLANS_ARROW = schema_to_pyarrow(PLANS, include_field_ids=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """A row of `plans`."""

    plan_id: str
    write_id: str
    source_table: str
    table_uuid: str
    snapshot_id: int
    tag: str
    schema_id: int
    row_filter: str
    columns: str
    units: int
    rows: int
    live_rows: int
    bytes: int
    created_at: datetime
    format_version: int = FORMAT_VERSION
    exclude: str = "[]"
    """JSON list of the expressions whose rows were left out in addition to the filter."""
    base_plan_id: str | None = None
    """The plan with the same units and more rows."""


def find_plan(lakehouse: Lakehouse, plan_id: str) -> PlanRow | None:
    """The plan with this id, if it was written."""
    rows = lakehouse.read_own("plans", equals("plan_id", plan_id)).to_pylist()
    if not rows:
        return None
    if rows[0]["format_version"] > FORMAT_VERSION:
        raise FormatTooNew(
            f"plan {plan_id!r} has format version {rows[0]['format_version']}, this DLAC reads up to {FORMAT_VERSION}: upgrade"
        )
    return PlanRow(**rows[0])


def get_plan(lakehouse: Lakehouse, plan_id: str) -> PlanRow:
    """The plan with this id. Raises `SpecInvalid` if there is none."""
    found = find_plan(lakehouse, plan_id)
    if found is None:
        raise SpecInvalid(f"expected a plan with id {plan_id!r} in the lakehouse, found none: run `dlac plan` first")
    return found


def write_plan(lakehouse: Lakehouse, plan: PlanRow, units: pa.Table) -> PlanRow:
    """Write units, then the plan row. Return the winning row if another process wrote the same plan."""
    written = equals("write_id", plan.write_id)
    append_own(lakehouse, "work_units", units, unless=lambda: _any(lakehouse, "work_units", written))
    row = pa.Table.from_pylist([asdict(plan)], schema=_PLANS_ARROW)
    append_own(lakehouse, "plans", row, unless=lambda: find_plan(lakehouse, plan.plan_id) is not None)
    return get_plan(lakehouse, plan.plan_id)


def read_units(lakehouse: Lakehouse, plan: PlanRow) -> pa.Table:
    """The plan's work units in order of `unit`. Raises `LakehouseError` if there are more or fewer than were planned."""
    found = lakehouse.read_own("work_units", equals("write_id", plan.write_id))
    if found.num_rows != plan.units:
        raise LakehouseError(
            f"expected {plan.units} work units of plan {plan.plan_id!r}, found {found.num_rows}: the table `work_units` was "
            "altered; restore it"
        )
    return found.sort_by("unit").cast(WORK_UNITS_ARROW)


def write_slices(lakehouse: Lakehouse, cut_id: str, slices: Callable[[], pa.Table]) -> None:
    """Write the slices of a cut, unless they exist. A cut's id is a digest of its content."""
    present = partial(_any, lakehouse, "slices", equals("cut_id", cut_id))
    if not present():
        append_own(lakehouse, "slices", slices(), unless=present)


def append_own(lakehouse: Lakehouse, name: str, rows: pa.Table, *, unless: Callable[[], bool]) -> None:
    """Append to an own table. `unless` is called before each try. Raises `CatalogUnreachable` after a minute."""

    def once() -> None:
        table = lakehouse.own(name)  # loaded before the look, so that a later commit makes this append fail
        if unless():
            return
        with committing(lakehouse, table) as transaction:
            transaction.append(rows)

    retrying()(once)


def _any(lakehouse: Lakehouse, name: str, row_filter: BooleanExpression) -> bool:
    return bool(lakehouse.read_own(name, row_filter, columns=("unit",)).num_rows)
