"""The `recoveries` table: one row per recovery, with its phases."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow

from catalog.connect import Lakehouse, equals, reachable
from catalog.plans import append_own
from catalog.retrying import rereading
from catalog.schemas import FORMAT_VERSION, RECOVERIES

_ARROW = schema_to_pyarrow(RECOVERIES, include_field_ids=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """One recovery; durations in seconds, each phase after the one before it."""

    run: str
    seq: int
    """The `seq` of the claim that began it."""
    attempt: int
    replaced_attempt: int
    cause: str
    noticed_by: str
    failed_at: datetime
    """Last sign of life of what failed."""
    resumed_from: str | None
    resumed_step: int
    rows_replayed: int
    detect_s: float
    """From the last sign of life to the notice."""
    stop_s: float
    claim_s: float
    verify_s: float
    load_s: float
    """Until all ranks have their state; includes what is left of their start."""
    first_step_s: float
    total_s: float
    outcome: str
    format_version: int = FORMAT_VERSION


def write_recovery(lakehouse: Lakehouse, recovery: Recovery) -> None:
    """Append one recovery, once."""

    def written() -> bool:
        return any(found.attempt == recovery.attempt for found in recoveries_of(lakehouse, recovery.run))

    append_own(lakehouse, "recoveries", pa.Table.from_pylist([asdict(recovery)], schema=_ARROW), unless=written)


def recoveries_of(lakehouse: Lakehouse, run: str) -> list[Recovery]:
    """All recoveries of a run in order of `seq`."""
    with reachable(lakehouse.config.uri):
        found = rereading()(lambda: lakehouse.own("recoveries").scan(row_filter=equals("run", run)).to_arrow())
    rows = found.to_pylist()
    return [Recovery(**row) for row in sorted(rows, key=lambda row: int(row["seq"]))]
