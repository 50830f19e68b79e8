"""The append to the ledger that opens a branch."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger import run_rows, typed_rows
from dlac_pipeline.lakehouse.ledger.branches import exclusions_of, rewinds_by_checkpoint, starts_over
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger, RunState
from dlac_pipeline.lakehouse.ledger.typed_rows import Exclusion, LedgerRow, RewindRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewound:
    """Result of a rewind."""

    checkpoint_id: str | None
    """The new head. None: the run is at its beginning."""
    step: int
    left: str | None
    """The head before."""
    left_step: int
    attempt: int
    """Attempt of the rewind itself. Older attempts are fenced off."""
    excluded_rows_seen: int | None = None
    """Rows that this rewind excludes and that the head has been trained on. None: not counted."""
    clean_checkpoint: str | None = None
    """The newest checkpoint before the head that has seen none of those rows. None: it does not exist, or the head is clean."""
    clean_step: int | None = None
    """The step of that checkpoint. Where there is none: 0 if the run can begin again, None if it was adopted or forked."""
    not_counted: str = ""
    """Reason why such rows could not be counted."""


def commit_rewind(
    ledger: Ledger,
    run: str,
    *,
    nonce: str,
    checkpoint_id: str | None,
    exclude: Sequence[Exclusion] = (),
    why: str = "",
    facts: Mapping[str, Any] = {},
) -> Rewound:
    """Make a restorable checkpoint the head, and `nonce` the owner of the run, in one append that repetition lands once.

    Without a checkpoint the run is at its beginning again. `facts` are further fields of the `ClaimRow`, whose
    attempt trains nothing. Raises `NoSuchCheckpoint` for one that is retired, quarantined or unknown, and `SpecInvalid` for
    the head if nothing else would change.
    """
    done: Rewound | None = None

    def decide(state: RunState) -> Append | None:
        nonlocal done
        rows = ledger.rows_at(state, kinds=typed_rows.HEAD_KINDS)
        landed = [row for row in rows if isinstance(row, RewindRow) and row.nonce == nonce]
        if landed:
            done = _rewound(landed[0])
            return None
        fence, step = state.fence, 0
        if checkpoint_id is not None:
            step = run_rows.restorable(run, rows, None, checkpoint_id=checkpoint_id).step
        _check_changes(run, rows, checkpoint_id, step, exclude)
        head = run_rows.checkpoint_rows(rows).get(fence.head or "")
        mine = run_rows.Fence(attempt=fence.attempt + 1, nonce=nonce, seq=fence.seq + 1, head=checkpoint_id)
        claims = typed_rows.ClaimRow(replaces=fence.attempt, purpose="rewinds", origin=checkpoint_id, **facts)
        row = RewindRow(
            attempt=mine.attempt,
            checkpoint_id=checkpoint_id,
            step=step,
            left_checkpoint=fence.head,
            left_step=0 if head is None else head.step,
            exclude=exclude,
            why=why,
        )
        done = _rewound(row)
        return Append(rows=[claims, row], fence=mine)

    ledger.append(run, decide)
    assert done is not None, "an append that did not raise was decided"
    return done


def _check_changes(
    run: str, rows: Sequence[LedgerRow], target: str | None, step: int, exclude: Sequence[Exclusion]
) -> None:
    found, now = rewinds_by_checkpoint(rows)
    wanted = tuple(dict.fromkeys([*exclusions_of(found.get(target or "", ())), *exclude]))
    stepped_back = target is None and not starts_over(rows)  # every checkpoint is damaged, and training is refused
    if target == run_rows.fence_of_rows(rows).head and wanted == exclusions_of(now) and not stepped_back:
        place = "its beginning" if target is None else f"the head {target!r}"
        raise SpecInvalid(
            f"expected another checkpoint than the head of run {run!r}, or rows to exclude, found {place} at step {step} as it "
            "is: nothing to rewind"
        )


def _rewound(row: RewindRow) -> Rewound:
    return Rewound(
        checkpoint_id=row.checkpoint_id,
        step=row.step,
        left=row.left_checkpoint,
        left_step=row.left_step,
        attempt=row.attempt,
    )
