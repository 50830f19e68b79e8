"""The door of row policies: those for poison rows and spikes, and one of another author, keep one contract."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.lakehouse.errors import LossSpiked, NoProgress
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.failure import Failure, planned_end
from dlac_pipeline.supervise.policies.restart import RestartPolicy
from dlac_pipeline.supervise.policies.row_policies import ROW_POLICIES
from dlac_pipeline.supervise.recovery_recorder import RecoveryRecorder
from dlac_pipeline.supervise.supervision import StopRequests
from tests.conftest import Arena
from tests.installed import install_distribution

_FAULTY_ROWS = """
from dlac_pipeline.lakehouse.errors import NoProgress

class FaultyRows:
    undecided = 0

    def __init__(self, context):
        self.context = context

    def rows_to_leave_out(self, attempt, failure):
        faulty = failure.detail.get("faulty", ())
        if "worn out" in faulty:
            self.context.give_up(failure, attempt.number, NoProgress, "expected rows that can be read")
        return self.context.leave_out({("f.parquet", 3): faulty}, step=7, reason="of the test") if faulty else ()
"""
DEATH = replace(planned_end("it died", step=6), kind="ValueError")


class FailedAttempt:
    """An attempt that committed nothing, as far as policies know it."""

    number, committed, leg, others = 1, False, None, ()
    folder = Path()


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The published events. A policy of another distribution is installed."""
    (site := tmp_path / "site").mkdir()
    install_distribution(
        site, "faulty", {"faulty": _FAULTY_ROWS}, {ROW_POLICIES.group: ["zz-faulty = faulty:FaultyRows"]}
    )
    monkeypatch.syspath_prepend(str(site))
    return []


@pytest.fixture
def restarts(arena: Arena, events: list[dict[str, Any]]) -> RestartPolicy:
    """The restart policy of a run with one attempt."""
    claim(Ledger(arena.lakehouse), "r", nonce="n1", replaces=0)
    spec = Request(spec=arena.spec("r")).spec
    recorder = RecoveryRecorder(arena.lakehouse, spec)
    return RestartPolicy(spec, Plans(arena.lakehouse), StopRequests(), recorder, events.append)


def plan_restart(restarts: RestartPolicy, failure: Failure) -> Sequence[Any]:
    """Return the rows that the attempt after a failed one leaves out."""
    attempt: Any = FailedAttempt()
    return restarts.plan_restart(attempt, failure)


def test_installed_policies_are_asked(restarts: RestartPolicy, events: list[dict[str, Any]]) -> None:
    """A policy of another distribution names rows, which the next attempt leaves out, and an event reports them."""
    [left_out] = plan_restart(restarts, replace(DEATH, detail={"faulty": [5, 2]}))
    assert (left_out.path, left_out.row_group, left_out.positions) == ("f.parquet", 3, (2, 5))
    assert [(each["event"], each["step"], each["rows"], each["tentative"]) for each in events] == [
        ("quarantine", 7, 2, True)
    ]


@pytest.mark.parametrize("name", ["poison", "spikes", "zz-faulty"])
def test_policy_leaves_other_failures(restarts: RestartPolicy, events: list[dict[str, Any]], name: str) -> None:
    """A policy names no row for a failure of another kind, also if it alone is asked, and publishes nothing."""
    assert plan_restart(restarts, replace(DEATH, detail={"policy": name})) == ()
    assert not restarts.copies_at_once
    assert plan_restart(restarts, replace(DEATH, kind="StateChanged")) == ()
    assert restarts.copies_at_once, "a state changed while it was copied"
    assert events == []


def test_named_policy_alone_is_asked(restarts: RestartPolicy) -> None:
    """An error that names a policy is of rows, so that its class ends no run, and no other policy names rows."""
    detail = {"faulty": [1], "policy": "poison"}
    assert plan_restart(restarts, replace(DEATH, kind=LossSpiked.__name__, detail=detail)) == ()
    with pytest.raises(LossSpiked):
        plan_restart(restarts, replace(DEATH, kind=LossSpiked.__name__))


def test_policy_ends_a_run(restarts: RestartPolicy, events: list[dict[str, Any]]) -> None:
    """A policy may give the run up. The error names the output of the attempt, and an event reports it."""
    with pytest.raises(NoProgress, match=r"expected rows that can be read, then train again; its output: `dlac logs r"):
        plan_restart(restarts, replace(DEATH, detail={"faulty": ["worn out"]}))
    assert "given_up" in [each["event"] for each in events]


def test_unknown_policy_is_as_none(restarts: RestartPolicy) -> None:
    """An exception of a script whose detail names a policy that is not installed is a failure like others."""
    assert plan_restart(restarts, replace(DEATH, detail={"policy": "none", "faulty": [4]})) != ()
