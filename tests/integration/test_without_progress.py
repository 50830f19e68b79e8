"""Attempts that commit nothing are counted, whatever ends those between them on purpose."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from dlac_pipeline.elastic.ranks.rank_share import Share
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.lakehouse.errors import NoProgress
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.supervise.attempt import SupervisedAttempt, Supervision
from dlac_pipeline.supervise.choose_leg import RESUME
from dlac_pipeline.supervise.incident import ended_on_purpose
from dlac_pipeline.supervise.policies.restart import RestartPolicy
from dlac_pipeline.supervise.start_ranks import RankStarter

if TYPE_CHECKING:
    from tests.conftest import Arena


def attempts(arena: Arena, count: int) -> tuple[RestartPolicy, list[SupervisedAttempt]]:
    """So many of a run of which two in a row may commit nothing, all of them claimed; and who judges them."""
    supervision = Supervision(
        spec=arena.spec("r", attempts_without_progress=2),
        lakehouse=arena.lakehouse,
        plans=Plans(arena.lakehouse),
        starter=RankStarter(),
        on_event=lambda event: None,
        stop=threading.Event(),
        leaves=threading.Event(),
        noticed_by=OPERATOR,
        noticed_at=0.0,
        launched_at=0.0,
        launched_by="",
    )
    made = []
    for number in range(1, count + 1):
        claim(Ledger(arena.lakehouse), "r", nonce=f"n{number}", replaces=number - 1, detail={})
        crew = Round(Share(world_size=1, ranks=1, port=1))
        made.append(SupervisedAttempt(supervision, crew, options=RESUME, replaces=None, failure=None))
        made[-1].number = number
    return RestartPolicy(supervision), made


def test_planned_end_without_commit_is_no_progress(arena: Arena) -> None:
    """Machines that come and go do not hide that nothing gets done."""
    judge, (first, on_purpose, last) = attempts(arena, 3)
    assert judge.left_out_behind(first, ended_on_purpose("it died", step=1)) == ()
    judge.went_on(on_purpose)
    with pytest.raises(NoProgress, match="committed nothing"):
        judge.left_out_behind(last, ended_on_purpose("it died again", step=1))


def test_planned_end_after_commit_is_progress(arena: Arena) -> None:
    """The failures before it count no more."""
    judge, (first, on_purpose, last) = attempts(arena, 3)
    judge.left_out_behind(first, ended_on_purpose("it died", step=1))
    on_purpose.committed = True
    judge.went_on(on_purpose)
    assert judge.left_out_behind(last, ended_on_purpose("it died again", step=1)) == ()
