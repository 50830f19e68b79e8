"""The decision of rank 0 about a run reaches all ranks, also as a failure."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.lakehouse.errors import SpecInvalid, TrainingFailed
from dlac_pipeline.train.startup import decide_on_first


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
