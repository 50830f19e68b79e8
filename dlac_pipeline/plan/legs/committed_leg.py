"""Legs that the rows of a run name, and the plans that a row names for a leg."""

from collections.abc import Sequence
from typing import Any

from dlac_pipeline.lakehouse.errors import LedgerError
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, lineage_of
from dlac_pipeline.lakehouse.ledger.typed_rows import LedgerRow, LegRow, PlannedSnapshot
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.replays import Replays


def first_leg_of(rows: Sequence[LedgerRow]) -> Leg | None:
    """Return the first leg of a run, or None if it has none."""
    legs = [row for row in rows if isinstance(row, LegRow)]
    return Leg.from_record(min(legs, key=lambda row: row.seq).record) if legs else None


def leg_of(rows: list[LedgerRow], checkpoint_id: str) -> Leg:
    """Return the leg in which a checkpoint ends: its own row names it, or the row of its nearest ancestor with a leg."""
    legs = {row.checkpoint_id: row.record for row in rows if isinstance(row, LegRow)}
    at = next((each for each in lineage_of(rows, checkpoint_id) if each in legs), None)
    if at is None:
        raise LedgerError(
            f"expected the leg of checkpoint {checkpoint_id!r} in the ledger, found none: restore the table"
        )
    return Leg.from_record(legs[at])


def replays_of(
    leg: Leg, order: LegOrder, ledger: Ledger, rows: Sequence[LedgerRow], checkpoint_id: str | None
) -> Replays | None:
    """Return the replays of the steps that a leg has skipped up to a checkpoint. None: only reading shows the leg's end."""
    end = order.total_steps if order.counted else None
    if end is None:
        return None
    return Replays(end=end, limit=leg.steps, skipped=skipped_in(leg, ledger, rows, checkpoint_id))


def skipped_in(leg: Leg, ledger: Ledger, rows: Sequence[LedgerRow], checkpoint_id: str | None) -> list[int]:
    """Return the steps of a leg up to a checkpoint that the engine did not apply, in order."""
    checkpoints = checkpoint_rows(rows)
    lineage = (checkpoints[each] for each in lineage_of(rows, checkpoint_id))
    return sorted(ledger.skipped_steps([row for row in lineage if row.leg == leg.index]))


def planned(leg: Leg) -> dict[str, Any]:
    """Return the fields of a `ClaimRow` for the plans that its attempt reads. Their snapshots stay pinned."""
    pins = [PlannedSnapshot(table_uuid=one.table_uuid, snapshot_id=one.snapshot_id) for one in leg.sources]
    return {"plan_ids": [one.plan_id for one in leg.sources], "leg_plan_ids": leg.plan_ids, "planned": pins}
