"""The start of a rank: its wait for the resume point, and the record of its recovery."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlac_pipeline.lakehouse.errors import CatalogUnreachable
from dlac_pipeline.train import own_reports
from dlac_pipeline.train.own_reports import OwnRecoveries
from dlac_pipeline.train.startup import await_resume_point
from tests.resume_points import memory_point

POINT = memory_point()


@pytest.mark.parametrize("ready_after_s", [0.0, 0.3, 2.0, 600.0])
def test_rank_polls_often_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ready_after_s: float) -> None:
    """The rank is at most 0.02 s plus a twentieth of its wait late, and polls seldom in a long verification."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) >= ready_after_s:
            (tmp_path / "resume.json").write_text(POINT.to_json())

    if not ready_after_s:
        (tmp_path / "resume.json").write_text(POINT.to_json())
    monkeypatch.setattr("dlac_pipeline.train.startup.time", SimpleNamespace(sleep=pause))
    assert await_resume_point(tmp_path) == POINT
    assert sum(pauses) - ready_after_s <= 0.02 + ready_after_s / 20
    assert len(pauses) <= 10 * ready_after_s + 50


def test_unrecorded_recovery_does_not_end_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The catalog is unavailable right after the claim: rank 0 trains with its peers, and logs a warning."""

    def fail(*_: object, **__: object) -> None:
        raise CatalogUnreachable("no answer")

    monkeypatch.setattr(own_reports, "Ledger", fail)
    monkeypatch.setenv("LOCAL_RANK", "0")
    nothing = cast(Any, None)
    recoveries = OwnRecoveries(nothing, nothing, nothing)
    recoveries.begin(POINT, claimed_at=0.0)
    recoveries.fail()
    assert "no answer" in caplog.text
