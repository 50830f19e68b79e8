"""Cursors, voted for by ranks or restored from a checkpoint, must match the order."""

from typing import Any

import pytest

from dlac_pipeline.checkpoint.commit.ledger_rows import RowMaker, Vote, agreed_reader_state
from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.plan.legs.leg import LegSequences
from dlac_pipeline.plan.source_order import Cursor
from dlac_pipeline.track.tracker import ReaderStateTracker
from dlac_pipeline.train.open_attempt import check_restored
from tests.legs import leg_of, order_of, units_of

ORDER = order_of(units_of([40, 40]))
STEP = 3


def votes(**changes: Any) -> list[Vote]:
    """Return the votes of two ranks after a step, with changed fields in the second vote."""
    state = ORDER.reader_state(STEP)
    nothing: Vote = {
        **{"failure": None, "files": [], "phases": {}, "step": STEP, "groups": [], "cursors": [], "advances": []},
        **{"reader": 0, "moved": "a"},
    }
    made = [
        {**nothing, "groups": groups, "cursors": [[list(source[group]) for source in state] for group in groups]}
        for groups in ([0, 1], [2, 3])
    ]
    return [made[0], {**made[1], **changes}]


def test_agreeing_ranks_are_accepted() -> None:
    """The reader state has the cursors of all key groups, by source."""
    assert agreed_reader_state(ORDER, votes(), STEP) == [[list(each) for each in ORDER.reader_state(STEP)[0]]]


def test_disagreeing_rank_is_refused() -> None:
    """A rank whose cursor contradicts the order, or whose step differs, prevents the commit of the checkpoint."""
    shifted = [[[0, 0, 1, 0]], [[0, 0, 1, 0]]]
    with pytest.raises(CursorMismatch, match=r"key group 2 at .* after step 3, rank 1 reported \[\[0, 0, 1, 0\]\]"):
        agreed_reader_state(ORDER, votes(cursors=shifted), STEP)
    with pytest.raises(CursorMismatch, match="expected rank 1 at step 3, found step 4"):
        agreed_reader_state(ORDER, votes(step=STEP + 1), STEP)


def test_other_moves_of_a_share_are_refused() -> None:
    """Two ranks of one share, of which one has seen other rows, prevent the commit. Ranks of two shares may differ."""
    leg = leg_of(sequences=LegSequences(length=8))
    taken = ReaderStateTracker(committed_step=0, groups=range(4), step=STEP)
    maker, found = RowMaker(leg, leg.order({"p": units_of([40])})), votes(reader=1, moved="b")
    assert maker.advances(taken, found) == []
    found[1]["reader"] = 0
    with pytest.raises(
        CursorMismatch, match=r"expected ranks 0 and 1, which read the same share, .* up to step 3, found"
    ):
        maker.advances(taken, found)


def test_shifted_cursor_is_named() -> None:
    """A restored cursor that contradicts the order is refused, and the error names its source and key group."""
    state = ORDER.reader_state(STEP)
    check_restored(ORDER, STEP, state)
    state[0][1] = Cursor(0, 0, state[0][1].position + 1)
    with pytest.raises(CursorMismatch, match="cursor of key group 1 in source 0"):
        check_restored(ORDER, STEP, state)
