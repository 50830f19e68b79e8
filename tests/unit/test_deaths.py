"""Which deaths count as deaths at the same rows, and when that leads to a quarantine."""

from __future__ import annotations

from typing import Any

import pytest

from dlac_pipeline.nodes.fleet import LOST
from dlac_pipeline.ranks.group import HANG
from dlac_pipeline.recover.incident import Failure
from dlac_pipeline.recover.same_rows import Deaths


def death(step: int, **said: Any) -> Failure:
    """An attempt that died with the batch of a step in hand."""
    moments: dict[str, Any] = dict.fromkeys(("failed_at", "noticed_at", "launched_at", "stopped_at"), 0.0)
    return Failure(cause="rank 0 died", noticed_by="supervisor", last_step=step - 1, in_hand=step, **moments, **said)


def verdicts(deaths: Deaths, *steps: int) -> list[bool]:
    """Whether the rows in hand are to be quarantined, after each of these deaths without a commit in between."""
    return [deaths.died(death(step), committed=False) for step in steps]


def test_the_third_death_in_one_step_is_one_too_many() -> None:
    """Only in a row: another step in between begins anew."""
    assert verdicts(Deaths(3), 7, 7, 7) == [False, False, True]
    assert verdicts(Deaths(3), 7, 7, 8, 7, 7, 7) == [False] * 5 + [True]


def test_a_commit_in_between_begins_anew() -> None:
    """An attempt that committed something has not died at the rows that the one before died at, as a step goes by once only."""
    deaths = Deaths(2)
    assert not deaths.died(death(7), committed=False)
    assert not deaths.died(death(7), committed=True)
    assert deaths.died(death(7), committed=False)


def test_what_another_rule_covers_is_not_counted() -> None:
    """Hangs, lost machines, errors of DLAC, and deaths without a batch in hand; a script's own error and a signal count."""
    for said in ({"kind": HANG}, {"kind": LOST}, {"kind": "DataFileUnreadable"}, {"kind": "StoreUnavailable"}):
        assert not Deaths(1).died(death(7, **said), committed=False)
    assert not Deaths(1).died(death(0), committed=False)
    assert Deaths(1).died(death(7, kind="ZeroDivisionError"), committed=False)
    assert Deaths(1).died(death(7, kind="OSError"), committed=False)


def test_a_quarantine_that_did_not_help_is_not_repeated() -> None:
    """Rows that take the place of others in the same step are not to blame; those of a later step may be."""
    deaths = Deaths(2)
    assert verdicts(deaths, 7, 7, 7, 7, 7, 7) == [False, True, False, False, False, False]
    assert verdicts(deaths, 9, 9) == [False, True]


@pytest.mark.parametrize(("times", "died", "undecided"), [(5, 4, True), (5, 5, False), (0, 3, False), (3, 0, False)])
def test_more_deaths_are_waited_for_only_where_they_would_decide(times: int, died: int, undecided: bool) -> None:
    """So NoProgress does not strike before the rows are quarantined, and strikes where they never will be."""
    deaths = Deaths(times)
    verdicts(deaths, *[7] * died)
    assert deaths.undecided == undecided
