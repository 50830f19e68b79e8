"""The ledger rows of a checkpoint: the checkpoint's own, the leg when it is new, and an advance for every block it moved."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from dlac_pipeline.lakehouse.ledger.arrow_rows import parse_columns
from dlac_pipeline.lakehouse.ledger.commits import Attempt
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, CheckpointRow, LedgerRow, LegRow, QuarantinedRowsRow
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.slices import cut_id_of
from dlac_pipeline.track.tracker import ReaderStateTracker

Vote = dict[str, Any]


@dataclass(frozen=True)
class AttemptLeg:
    """An attempt, the leg that it trains, and the checkpoint from which it resumes. `order` is used by its committer only."""

    attempt: Attempt
    leg: Leg
    is_new: bool
    order: LegOrder
    parent: str | None = None
    """Id of the checkpoint, or None at the beginning."""
    parent_folder: str | None = None
    """Name of the checkpoint in the store."""


class RowMaker:
    """Maker of the rows of one attempt's checkpoints. `order` is used here only, because rows may be made in the background."""

    def __init__(self, leg: Leg, order: LegOrder) -> None:
        self._leg = leg
        self._order = order
        self._cuts: dict[tuple[int, int], str] = {}

    def checkpoint(self, taken: ReaderStateTracker, **facts: Any) -> CheckpointRow:
        """Return the checkpoint's own row, with further fields from `facts`."""
        skipped = len(taken.skipped)
        return CheckpointRow(
            leg=self._leg.index,
            step=taken.step,
            applied_steps=taken.step - taken.committed_step - skipped,
            skipped_steps=skipped,
            losses=list(taken.losses),
            **facts,
        )

    def rows(self, checkpoint: CheckpointRow, advances: Sequence[AdvanceRow], *, leg_is_new: bool) -> list[LedgerRow]:
        """Return the other rows of the checkpoint: the leg's if it is new, and the advances."""
        rows: list[LedgerRow] = self._leg_rows(checkpoint.checkpoint_id) if leg_is_new else []
        return rows + [
            replace(
                advance,
                checkpoint_id=checkpoint.checkpoint_id,
                leg=checkpoint.leg,
                step=checkpoint.step,
                plan_id=self._order.sources[advance.source].open_cut_of(advance.pass_index).live_plan_id,
                cut_id=self._cut_id(advance.source, advance.pass_index),
            )
            for advance in advances
        ]

    def _leg_rows(self, checkpoint_id: str) -> list[LedgerRow]:
        index, step = self._leg.index, self._leg.start_step
        leg = LegRow(checkpoint_id=checkpoint_id, leg=index, step=step, more=self._leg.to_record())
        quarantined = [
            QuarantinedRowsRow(leg=index, source=number, **asdict(unit))
            for number, source in enumerate(self._leg.sources)
            for unit in source.quarantined
        ]
        return [leg, *quarantined]

    def advances(self, taken: ReaderStateTracker, votes: Sequence[Vote]) -> list[AdvanceRow]:
        """Return the ranges that all ranks consumed since the last checkpoint: by the order, or by the readers' votes."""
        if not self._order.counted:
            found = parse_columns([advance for vote in votes for advance in vote["advances"]])
            advances = [row for row in found if isinstance(row, AdvanceRow)]
            return sorted(advances, key=lambda each: (each.source, each.key_group))
        return [
            advance
            for first, last, applied in taken.stretches()
            for group in range(self._order.settings.key_groups)
            for advance in self._order.advances(group, first, last, applied=applied)
        ]

    def _cut_id(self, source: int, pass_index: int) -> str:
        """Return the id of a pass's cut."""
        if (source, pass_index) not in self._cuts:
            order = self._order.sources[source]
            plan_id = order.open_cut_of(pass_index).plan_id
            self._cuts[source, pass_index] = cut_id_of(plan_id, order.cut_of(pass_index))
        return self._cuts[source, pass_index]
