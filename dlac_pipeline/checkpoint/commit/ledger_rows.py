"""The ledger rows and the reader state of a checkpoint, from the votes of the ranks. All ranks, and the order, must agree."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.lakehouse.ledger.arrow_rows import parse_columns
from dlac_pipeline.lakehouse.ledger.commits import Attempt
from dlac_pipeline.lakehouse.ledger.typed_rows import (
    AdvanceRow,
    CheckpointRow,
    LedgerRow,
    LegRow,
    MembershipRow,
    QuarantinedRowsRow,
    ReplayRow,
)
from dlac_pipeline.plan.legs.leg import Leg
from dlac_pipeline.plan.order import LegOrder
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
    parent_damage: str = ""
    """Why the checkpoint cannot be restored, or empty: the attempt resumed from memory. Its first commit quarantines it."""
    writer: str = ""
    """Name of this process, where several processes of an attempt may commit checkpoints of one step."""

    @property
    def nonce(self) -> str:
        """Name in the names of checkpoints, which no other process uses."""
        return self.attempt.nonce + self.writer


class RowMaker:
    """Maker of the rows of one attempt's checkpoints. `order` is used here only, because rows may be made in the background."""

    def __init__(self, leg: Leg, order: LegOrder) -> None:
        self._leg = leg
        self._order = order

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

    def memberships(self, taken: ReaderStateTracker, checkpoint_id: str) -> list[LedgerRow]:
        """Return a row for each change of the process groups present."""
        return [
            MembershipRow(checkpoint_id=checkpoint_id, leg=self._leg.index, first_step=step, groups=groups)
            for step, groups in taken.memberships
        ]

    def rows(
        self,
        checkpoint: CheckpointRow,
        advances: Sequence[AdvanceRow],
        cut_ids: Mapping[tuple[int, int], str],
        *,
        leg_is_new: bool,
    ) -> list[LedgerRow]:
        """Return all further rows of the checkpoint: the leg's if it is new, and the advances. `cut_ids`: by source and pass."""
        rows: list[LedgerRow] = self._leg_rows(checkpoint.checkpoint_id) if leg_is_new else []
        return rows + [
            replace(
                advance,
                checkpoint_id=checkpoint.checkpoint_id,
                leg=checkpoint.leg,
                step=checkpoint.step,
                plan_id=self._order.sources[advance.source].open_cut_of(advance.pass_index).live_plan_id,
                cut_id=cut_ids[advance.source, advance.pass_index],
            )
            for advance in advances
        ]

    def _leg_rows(self, checkpoint_id: str) -> list[LedgerRow]:
        index, step = self._leg.index, self._leg.start_step
        leg = LegRow(checkpoint_id=checkpoint_id, leg=index, step=step, leg_json=self._leg.to_json())
        quarantined = [
            QuarantinedRowsRow(leg=index, source=number, **asdict(unit))
            for number, source in enumerate(self._leg.sources)
            for unit in source.quarantined
        ]
        return [leg, *quarantined]

    def advances(self, taken: ReaderStateTracker, votes: Sequence[Vote]) -> list[AdvanceRow]:
        """Return the ranges that all ranks consumed since the last checkpoint: by the order, or by the readers' votes."""
        if not self._order.counted:
            _check_moves(votes, taken.step)
            found = parse_columns([advance for vote in votes for advance in vote["advances"]])
            advances = [row for row in found if isinstance(row, AdvanceRow)]
            return sorted(advances, key=lambda each: (each.source, each.key_group))
        end = taken.step if taken.replays is None else taken.replays.end
        return [
            row
            for first, last, applied in taken.step_ranges()
            for rows in (
                self._advances(first, min(last, end), applied=applied),
                *(self._replay(taken, step, applied=applied) for step in range(max(first, end + 1), last + 1)),
            )
            for row in rows
        ]

    def _advances(self, first: int, last: int, *, applied: bool) -> list[AdvanceRow]:
        groups = range(self._order.settings.key_groups if first <= last else 0)
        return [row for group in groups for row in self._order.advances(group, first, last, applied=applied)]

    def _replay(self, taken: ReaderStateTracker, step: int, *, applied: bool) -> list[AdvanceRow]:
        """Return the ranges of the step that this one replayed."""
        assert taken.replays is not None, "the order has a step otherwise"
        original = taken.replays.original(step)
        found = self._advances(original, original, applied=applied)
        own = {"first_step": step, "last_step": step}
        return [ReplayRow(**{each.name: getattr(row, each.name) for each in fields(row)} | own) for row in found]


def readers_of(votes: Sequence[Vote]) -> int:
    """Return the number of shares in which the ranks read the batches."""
    return len({vote["reader"] for vote in votes})


def _check_moves(votes: Sequence[Vote], step: int) -> None:
    """Raise `CursorMismatch` if ranks of one share have seen other moves, of which the ledger has those of one rank."""
    first: dict[int, int] = {}
    for rank, vote in enumerate(votes):
        if not vote["groups"]:  # it reads nothing
            continue
        speaker = first.setdefault(vote["reader"], rank)
        if vote["moved"] != votes[speaker]["moved"]:
            raise CursorMismatch(
                f"expected ranks {speaker} and {rank}, which read the same share, to have the same rows up to step {step}, found "
                "other ones: the transform or the tokenizer is not deterministic; nothing was committed"
            )


def agreed_reader_state(order: LegOrder, votes: Sequence[Vote], step: int) -> list[list[list[int]]]:
    """Return the cursors that the readers reported, by source and key group.

    Where a step determines every cursor, each is compared with it. Ranks that share a key group must agree. Raise
    `CursorMismatch` if a reader has another cursor, or is at another step.
    """
    state = [[list(c) for c in cursors] for cursors in order.reader_state(step)] if order.counted else None
    reported: dict[int, list[list[int]]] = {}
    for rank, vote in enumerate(votes):
        if vote["step"] != step:
            raise CursorMismatch(f"expected rank {rank} at step {step}, found step {vote['step']}")
        for group, cursors in zip(vote["groups"], vote["cursors"], strict=bool(vote["cursors"])):
            expected = reported.setdefault(group, cursors) if state is None else [each[group] for each in state]
            if cursors != expected:
                raise CursorMismatch(
                    f"expected the cursors of key group {group} at {expected} after step {step}, rank {rank} "
                    f"reported {cursors}: the reader and the order disagree; nothing was committed"
                )
    groups = range(order.settings.key_groups)
    return state or [[reported[group][source] for group in groups] for source in range(len(order.sources))]
