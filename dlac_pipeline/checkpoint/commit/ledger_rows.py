"""The ledger rows of a checkpoint: the checkpoint's own, the leg when it is new, and an advance for every block it moved."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import Advance, LegOrder
from dlac_pipeline.plan.slices import cut_id_of
from dlac_pipeline.track.tracker import ReaderStateTracker

Vote = dict[str, Any]


class RowMaker:
    """Maker of the rows of one attempt's checkpoints. `order` is used here only, because rows may be made in the background."""

    def __init__(self, leg: Leg, order: LegOrder) -> None:
        self._leg = leg
        self._order = order
        self._cuts: dict[tuple[int, int], str] = {}

    def rows(
        self, taken: ReaderStateTracker, advances: Sequence[Advance], *, leg_is_new: bool, **checkpoint: Any
    ) -> list[dict[str, Any]]:
        """Return the rows, the checkpoint's own first. `checkpoint` has its further facts."""
        named = {"checkpoint_id": checkpoint["checkpoint_id"], "leg": self._leg.index}
        skipped = len(taken.skipped)
        first = {
            "kind": "checkpoint",
            **checkpoint,
            "leg": self._leg.index,
            "step": taken.step,
            "applied_steps": taken.step - taken.committed_step - skipped,
            "skipped_steps": skipped,
            "losses": list(taken.losses),
        }
        moved = [{**named, "step": taken.step, **self._advance_row(advance)} for advance in advances]
        leg = {"kind": "leg", **named, "step": self._leg.start_step, "detail": self._leg.to_json()}
        quarantines = [
            {"kind": "quarantine", "leg": self._leg.index, "source": index, "detail": json.dumps(asdict(unit))}
            for index, source in enumerate(self._leg.sources)
            for unit in source.quarantined
        ]
        return [first, *([leg, *quarantines] if leg_is_new else []), *moved]

    def advances(self, taken: ReaderStateTracker, votes: Sequence[Vote]) -> list[Advance]:
        """Return the ranges that all ranks consumed since the last checkpoint: by the order, or by the readers' votes."""
        if not self._order.counted:
            found = [Advance(**_tuples(advance)) for vote in votes for advance in vote["advances"]]
            return sorted(found, key=lambda each: (each.source, each.group))
        return [
            advance
            for first, last, applied in taken.stretches()
            for group in range(self._order.settings.key_groups)
            for advance in self._order.advances(group, first, last, applied=applied)
        ]

    def _advance_row(self, advance: Advance) -> dict[str, Any]:
        cut = self._order.sources[advance.source].open_cut_of(advance.pass_index)
        reasons = dict(advance.quarantined)
        return {
            "kind": "advance",
            "plan_id": cut.live_plan_id,
            "cut_id": self._cut_id(advance.source, advance.pass_index),
            "pass": advance.pass_index,
            "key_group": advance.group,
            "source": advance.source,
            "block": advance.block,
            "position_start": advance.position_start,
            "position_end": advance.position_end,
            "first_step": advance.first_step,
            "last_step": advance.last_step,
            "rows_consumed": advance.rows_consumed,
            "rows_dead": advance.rows_dead,
            "rows_filtered": len(advance.filtered),
            "rows_quarantined": len(reasons),
            "token_start": advance.token_start,
            "token_end": advance.token_end,
            "filtered": list(advance.filtered) or None,
            "quarantined": list(reasons) or None,
            "detail": json.dumps({"quarantined": reasons}) if reasons else None,
            "applied": advance.applied,
        }

    def _cut_id(self, source: int, pass_index: int) -> str:
        """Return the id of a pass's cut."""
        if (source, pass_index) not in self._cuts:
            order = self._order.sources[source]
            plan_id = order.open_cut_of(pass_index).plan_id
            self._cuts[source, pass_index] = cut_id_of(plan_id, order.cut_of(pass_index))
        return self._cuts[source, pass_index]


def _tuples(advance: dict[str, Any]) -> dict[str, Any]:
    """An advance as it was before it travelled."""
    quarantined = tuple((position, reason) for position, reason in advance["quarantined"])
    return {**advance, "filtered": tuple(advance["filtered"]), "quarantined": quarantined}
