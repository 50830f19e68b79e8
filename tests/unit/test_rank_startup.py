"""The start of a rank: the decision of rank 0, the resume point, and the record of the recovery."""

import json
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint, resume_point_of
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, SpecInvalid, TrainingFailed
from dlac_pipeline.train import own_reports
from dlac_pipeline.train.own_reports import OwnRecoveries
from dlac_pipeline.train.startup import decide_on_first
from tests.memory_states import fresh_start
from tests.resume_points import memory_point

POINT = memory_point()


def test_unrecorded_recovery_does_not_end_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The catalog is unavailable right after the claim: rank 0 trains with its peers, and logs a warning."""
    monkeypatch.setattr(own_reports, "Ledger", Mock(side_effect=CatalogUnreachable("no answer")))
    monkeypatch.setenv("LOCAL_RANK", "0")
    nothing = cast(Any, None)
    recoveries = OwnRecoveries(nothing, nothing, nothing)
    recoveries.begin(POINT, claimed_at=0.0)
    recoveries.fail()
    assert "no answer" in caplog.text


class _Recorded(RankTree):
    """The tree of one rank, which keeps what it sends."""

    def __init__(self, rank: int, received: bytes = b"") -> None:
        super().__init__(0, 1, None)
        self.rank, self.received = rank, received
        self.sent: list[dict[str, Any]] = []

    def broadcast(self, payload: bytes | None) -> bytes:
        if payload is not None and payload:
            self.sent.append(json.loads(payload))
        return self.received if payload is None else payload

    def lowest(self, payload: bytes) -> bytes:
        return payload


def _decide(tree: RankTree, error: Exception | None = None) -> str:
    def decide() -> str:
        if error is not None:
            raise error
        return json.dumps({"attempt": 1})

    return decide_on_first(cast(Any, SimpleNamespace(tree=tree, is_first_of_node=False)), cast(Any, None), decide)


@pytest.mark.parametrize(
    ("error", "message"),
    [(SpecInvalid("expected a, found b"), "expected a, found b"), (KeyError("host"), "KeyError: 'host'")],
)
def test_failed_decision_frees_all_ranks(error: Exception, message: str) -> None:
    """Each error of rank 0 is raised there, and is sent to ranks that wait for the decision. They raise its text."""
    first = _Recorded(0)
    with pytest.raises(type(error)):
        _decide(first, error)
    assert first.sent == [{"error": message}]
    with pytest.raises(TrainingFailed, match=message):
        _decide(_Recorded(1, json.dumps(first.sent[0]).encode()))


_POINTS = [fresh_start(), memory_point(sources=[("127.0.0.1", 7, [0, 2]), ("::1", 8, [1])])]


@pytest.mark.parametrize("point", _POINTS, ids=lambda point: type(point).__name__)
def test_json_of_point_is_exact(point: ResumePoint) -> None:
    """Each value has its type again: an address is a key of a mapping."""
    assert resume_point_of(json.loads(point.to_json())) == point
