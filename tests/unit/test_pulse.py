"""Notices, wishes and losses reach every rank at the same step, however fast the steps are."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from dlac_pipeline.checkpoint.step_sync import MAX_STEPS, RankReport, StepSync, StepSyncs
from dlac_pipeline.lakehouse.errors import CursorMismatch

QUIET = RankReport()


def beats_of(pulse: StepSyncs, steps: int, *, stop_at: int = 0) -> list[tuple[int, StepSync]]:
    """(step at which it was heard, beat) of a pulse whose loss is the step's number."""
    heard = []
    for step in range(1, steps + 1):
        says = RankReport(notice="SIGTERM", notice_age_s=1.5) if 0 < stop_at <= step else QUIET
        beat = pulse.step_done(step, loss=float(step), report=says)
        if beat is not None:
            heard.append((step, beat))
    return heard + [(steps, beat) for beat in pulse.flush()]


def test_every_loss_is_heard_once_and_in_order() -> None:
    """Beats may cover several steps; together they cover each step exactly once."""
    heard = beats_of(StepSyncs(1, None), 100)
    assert [loss for _, beat in heard for loss in beat.losses] == [float(step) for step in range(1, 101)]
    assert all(beat.step == beat.losses[-1] for _, beat in heard)


def test_fast_steps_share_message_with_notice() -> None:
    """Steps of microseconds are told of in beats of at most MAX_STEPS; a notice is heard one step behind its beat."""
    heard = beats_of(StepSyncs(1, None), 300, stop_at=50)
    assert max(len(beat.losses) for _, beat in heard) == MAX_STEPS
    first, beat = next((step, beat) for step, beat in heard if beat.notice)
    assert 50 < first <= 50 + MAX_STEPS + 1
    assert (beat.notice, beat.notice_age_s) == ("SIGTERM", 1.5)


def test_rank_0_request_is_in_its_step() -> None:
    """A checkpoint that is due, how long it takes, room for machines: heard with the losses, and gone with the next beat."""
    pulse = StepSyncs(1, None)
    pulse.step_done(1, loss=0.5, report=RankReport(due=True, needed_s=2.5, makes_room=True))
    assert pulse.step_done(2, loss=0.5, report=QUIET) == StepSync(1, [0.5], due=True, needed_s=2.5, makes_room=True)
    assert pulse.flush() == [StepSync(2, [0.5])]


def test_message_arrives_one_step_later() -> None:
    """The first step's beat arrives with the second step; a flush leaves nothing unsaid."""
    pulse = StepSyncs(1, None)
    assert pulse.step_done(1, loss=0.5, report=QUIET) is None
    assert pulse.step_done(2, loss=0.25, report=QUIET) == StepSync(1, [0.5])
    assert pulse.flush() == [StepSync(2, [0.25])]
    assert pulse.flush() == []


def test_ranks_at_different_steps_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that left out a batch would train on other rows than the ledger says: an error, not a silence."""

    def other_rank_is_one_step_behind(said: object, **_: object) -> None:
        said[0] += 4  # type: ignore[index]  # the tensor of the beat

    monkeypatch.setattr(dist, "all_reduce", other_rank_is_one_step_behind)
    pulse = StepSyncs(2, None)
    pulse.step_done(5, loss=0.0, report=QUIET)
    with pytest.raises(CursorMismatch, match="expected all 2 ranks at step 5"):
        pulse.flush()
