"""Consecutive deaths of attempts: the next attempt is the same, leaves the rows in hand out, or does not start."""

from typing import Any

import pytest

from dlac_pipeline.elastic.ranks.processes import HANG
from dlac_pipeline.extensions.poison.poison_rows import CrashLoop
from dlac_pipeline.supervise.failure import Failure, first_cause
from dlac_pipeline.supervise.ranks.all_ranks import LOST
from dlac_pipeline.supervise.ranks.local_ranks import Exit


def death(step: int, cause: str = "rank 0 was killed by SIGSEGV", **fields: Any) -> Failure:
    """Return the failure of an attempt that died with the batch of a step in hand."""
    moments: dict[str, Any] = dict.fromkeys(("failed_at", "noticed_at", "launched_at", "stopped_at"), 0.0)
    return Failure(cause=cause, noticed_by="supervisor", last_step=max(0, step - 1), in_hand=step, **moments, **fields)


def raised(step: int, place: str = "train.py:7", **fields: Any) -> Failure:
    """Return the failure of an attempt whose script raised an exception in a step, or outside of one if it is 0."""
    defaults = {"kind": "ValueError", "origin": "script", "trained": step > 1, "place": place}
    return death(step, **{"cause": "rank 0 died of ValueError: no", **defaults, **fields})


def verdicts(deaths: CrashLoop, *failures: Failure | int) -> list[str]:
    """Return the verdict after each of these deaths, without a commit in between."""
    found = (each if isinstance(each, Failure) else death(each) for each in failures)
    return [deaths.decide(each, committed=False) for each in found]


AGAIN, OUT, STOP = "restart", "leave out", "stop"


def test_third_death_leaves_rows_out() -> None:
    """Only consecutive deaths count: a death at another step begins the count at one."""
    assert verdicts(CrashLoop(3), 7, 7, 7) == [AGAIN, AGAIN, OUT]
    assert verdicts(CrashLoop(3), 7, 7, 8, 7, 7, 7) == [AGAIN] * 5 + [OUT]


def test_late_death_blames_nothing() -> None:
    """The first error of an accelerator may belong to another step. The next attempts synchronize, and have the rows in hand."""

    def reported(step: int) -> Failure:
        return raised(step, kind="AcceleratorError")

    deaths = CrashLoop(3)
    assert verdicts(deaths, reported(12), reported(10), reported(10)) == [AGAIN] * 3
    assert deaths.undecided
    assert deaths.in_a_row == 3  # three attempts without progress do not end the run
    assert verdicts(deaths, reported(10), reported(10)) == [OUT, STOP]


def test_late_death_after_commit() -> None:
    """After a commit an attempt no longer synchronizes with its device."""
    deaths = CrashLoop(2)
    assert deaths.decide(raised(5), committed=False) == AGAIN
    assert deaths.decide(raised(12, kind="AcceleratorError"), committed=True) == AGAIN
    assert (deaths.count, deaths.in_a_row) == (0, 0)
    assert verdicts(deaths, *[raised(10, kind="AcceleratorError")] * 2) == [AGAIN, OUT]


def test_commit_resets_deaths() -> None:
    """An attempt that commits has passed the rows of the earlier death, as each step is trained once."""
    deaths = CrashLoop(2)
    assert deaths.decide(death(7), committed=False) == AGAIN
    assert deaths.decide(death(7), committed=True) == AGAIN
    assert deaths.decide(death(7), committed=False) == OUT


def test_other_rules_blame_no_rows() -> None:
    """Hangs, lost nodes, errors of DLAC, transient errors and deaths without a batch do not count. A signal does."""
    for fields in ({"kind": HANG}, {"kind": LOST}, {"kind": "DataFileUnreadable"}, {"kind": "StoreUnavailable"}):
        assert verdicts(CrashLoop(1), death(7, **fields)) == [AGAIN]
    for origin in ("passing", "peer"):
        assert verdicts(CrashLoop(1), *[raised(7, origin=origin)] * 4) == [AGAIN] * 4
    assert verdicts(CrashLoop(1), 0) == [AGAIN]
    assert verdicts(CrashLoop(1), death(7, kind="ZeroDivisionError")) == [OUT]
    assert verdicts(CrashLoop(1), death(7, kind="OSError")) == [OUT]


def test_same_death_with_other_rows_stops() -> None:
    """Other rows in the same step show that the rows are not to blame. Rows of a later step may be."""
    assert verdicts(CrashLoop(2), 7, 7, 7) == [AGAIN, OUT, STOP]
    assert verdicts(CrashLoop(2), 7, 7, 9, 9, 9) == [AGAIN, OUT, AGAIN, OUT, STOP]
    otherwise = death(7, "rank 0 died with exit status 3")
    assert verdicts(CrashLoop(2), 7, 7, otherwise, otherwise) == [AGAIN, OUT, AGAIN, AGAIN]


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([raised(0), raised(0)], [AGAIN, STOP]),
        ([raised(5), raised(7)], [AGAIN, STOP]),
        ([raised(5)] * 4, [AGAIN, AGAIN, OUT, STOP]),
        ([*[raised(5)] * 3, raised(4)], [AGAIN, AGAIN, OUT, STOP]),
        ([*[raised(5)] * 3, death(3), raised(5), raised(5)], [AGAIN, AGAIN, OUT, AGAIN, AGAIN, STOP]),
        ([raised(5), *[raised(5, "train.py:9")] * 3], [AGAIN, AGAIN, OUT, STOP]),
        ([raised(0), death(0), raised(0)], [AGAIN] * 3),
        ([raised(1, origin="dlac")] * 2, [AGAIN, STOP]),
        ([raised(5, kind="", cause="rank 0 died with exit status 3")] * 2, [AGAIN, STOP]),
    ],
)
def test_same_exception_twice_stops(failures: list[Failure], expected: list[str]) -> None:
    """The run ends, unless the same rows were in hand both times and may be to blame: then they are left out once."""
    assert verdicts(CrashLoop(3), *failures) == expected


@pytest.mark.parametrize(("times", "died", "undecided"), [(5, 4, True), (5, 5, False), (0, 3, False), (3, 0, False)])
def test_no_progress_waits_for_decision(times: int, died: int, undecided: bool) -> None:
    """NoProgress waits while the rows may still be quarantined, and ends the run if they never are."""
    deaths = CrashLoop(times)
    verdicts(deaths, *[7] * died)
    assert deaths.undecided == undecided


SCRIPT = Exit(rank=1, code=1, kind="ValueError", at=5.0, origin="script", place="x")
PEER = Exit(rank=0, code=1, kind="RuntimeError", at=4.0, origin="peer", place="y")


@pytest.mark.parametrize(
    ("failures", "blamed"),
    [
        ([PEER, SCRIPT], 1),
        ([SCRIPT, Exit(rank=2, code=-6)], 1),
        ([SCRIPT, Exit(rank=2, code=-11)], 2),
        ([SCRIPT, Exit(rank=2, code=80, kind="Fenced", at=3.0)], 2),
        ([SCRIPT, Exit(rank=3, code=1, kind=LOST, at=0.0)], 3),
        ([PEER], 0),
    ],
)
def test_first_to_fail_is_blamed(failures: list[Exit], blamed: int) -> None:
    """Ranks whose connection to the failed rank broke are not blamed, nor are ranks that NCCL aborts."""
    assert first_cause(failures).rank == blamed
