"""Attempts that commit nothing are counted, whatever ends those between them on purpose."""

from contextlib import nullcontext
from dataclasses import replace

import pytest

from dlac_pipeline.elastic.rank_assignment import Share
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.lakehouse.errors import MemoryStateLost, NoProgress
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.attempt import SupervisedAttempt
from dlac_pipeline.supervise.attempts import Attempts
from dlac_pipeline.supervise.failure import planned_end
from dlac_pipeline.supervise.policies.restart import RestartPolicy
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.supervise.ranks.run_events import RunEvents
from dlac_pipeline.supervise.start.request import ResumeOptions
from dlac_pipeline.supervise.supervision import Supervision
from tests.conftest import Arena


def failed_attempts(arena: Arena, count: int) -> tuple[RestartPolicy, list[SupervisedAttempt]]:
    """Claim attempts of a run that may have two in a row without a commit. Return its restart policy and the attempts."""
    request, starter = Request(spec=arena.spec("r", attempts_without_progress=2)), RankStarter()
    supervision = Supervision(request=request, plans=Plans(arena.lakehouse))
    events = RunEvents("r", lambda event: None)
    attempts = Attempts(supervision, starter, events)
    made = []
    for number in range(1, count + 1):
        claim(Ledger(arena.lakehouse), "r", nonce=f"n{number}", replaces=number - 1)
        alone = Round(Share(world_size=1, ranks=1, port=1))
        made.append(attempts.lead(alone, ResumeOptions(), replaces=None, failure=None))
        made[-1].number = number
    policy = RestartPolicy(supervision.spec, supervision.plans, supervision.stops, attempts.recorder, events.publish)
    return policy, made


@pytest.mark.parametrize("committed", [False, True])
def test_planned_end_needs_commit(arena: Arena, committed: bool) -> None:
    """Machines that come and go do not hide that nothing gets done. After a commit the failures before it count no more."""
    policy, (first, on_purpose, last) = failed_attempts(arena, 3)
    assert policy.plan_restart(first, planned_end("it died", step=1)) == ()
    on_purpose.committed = committed
    policy.note_rescale(on_purpose)
    with nullcontext() if committed else pytest.raises(NoProgress, match="committed nothing"):
        assert policy.plan_restart(last, planned_end("it died again", step=1)) == ()


def test_lost_memory_is_no_failed_attempt(arena: Arena) -> None:
    """The attempt after it reads a checkpoint, and counts as the one without progress."""
    policy, (first, lost, last) = failed_attempts(arena, 3)
    policy.plan_restart(first, planned_end("it died", step=1))
    assert policy.plan_restart(lost, replace(planned_end("lost", step=1), kind=MemoryStateLost.__name__)) == ()
    with pytest.raises(NoProgress, match="committed nothing"):
        policy.plan_restart(last, planned_end("it died again", step=1))
