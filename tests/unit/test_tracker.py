import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.track.tracker import ReaderStateTracker
from tests.small_records import small_batch


def batch(step: int) -> Batch:
    """Return a batch without samples for this step."""
    return small_batch(step=step, cursors=np.array([[[0, 0, step, 0]]], dtype=np.int64))


@given(st.integers(0, 50), st.lists(st.booleans(), max_size=30))
def test_ranges_cover_every_step_once(committed: int, applied: list[bool]) -> None:
    """Ranges of applied steps and single skipped steps follow each other without a gap, in order."""
    tracker = ReaderStateTracker(committed_step=committed, groups=range(1))
    for step, was_applied in enumerate(applied, start=committed + 1):
        tracker.step_done(batch(step), applied=was_applied)
    covered = [(step, flag) for first, last, flag in tracker.step_ranges() for step in range(first, last + 1)]
    assert covered == list(enumerate(applied, start=committed + 1))
    assert len([flag for _, _, flag in tracker.step_ranges() if flag]) <= len(tracker.skipped) + 1


def test_next_range_begins_at_commit() -> None:
    """Steps that a checkpoint has recorded are not recorded again."""
    tracker = ReaderStateTracker(committed_step=0, groups=range(1))
    tracker.step_done(batch(1), applied=True)
    tracker.step_done(batch(2), applied=False)
    tracker.losses.append(0.5)
    tracker.take()
    assert (list(tracker.step_ranges()), tracker.losses, tracker.skipped) == ([], [], [])
    tracker.step_done(batch(3), applied=True)
    assert list(tracker.step_ranges()) == [(3, 3, True)]
    assert tracker.cursors is not None
    assert tracker.cursors.tolist() == [[[0, 0, 3, 0]]]


@pytest.mark.parametrize("step", [3, 5, 6])
def test_step_out_of_order_is_refused(step: int) -> None:
    """The error of a skipped or repeated step names both steps, and nothing is recorded."""
    tracker = ReaderStateTracker(committed_step=3, groups=range(1))
    with pytest.raises(CursorMismatch, match=rf"expected step_done for step 4, found step {step}"):
        tracker.step_done(batch(step), applied=True)
    assert (tracker.step, tracker.cursors) == (3, None)
