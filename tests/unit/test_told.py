"""What a rank waits for when it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlac_pipeline.lakehouse.errors import CatalogUnreachable
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.train import startup
from dlac_pipeline.train.own_recovery import OwnRecoveries
from dlac_pipeline.train.startup import await_resume_point

POINT = ResumePoint(attempt=2, nonce="n", replaces=1, leg="{}", leg_is_new=False, step=7)


@pytest.mark.parametrize("there_after_s", [0.0, 0.3, 2.0, 600.0])
def test_rank_polls_often_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there_after_s: float) -> None:
    """It is late by a fiftieth of a second or a twentieth of its wait; while a large checkpoint is verified it looks seldom."""
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if sum(pauses) >= there_after_s:
            (tmp_path / "resume.json").write_text(POINT.to_json())

    if not there_after_s:
        (tmp_path / "resume.json").write_text(POINT.to_json())
    monkeypatch.setattr("dlac_pipeline.train.startup.time", SimpleNamespace(sleep=pause))
    assert await_resume_point(tmp_path) == POINT
    assert sum(pauses) - there_after_s <= 0.02 + there_after_s / 20
    assert len(pauses) <= 10 * there_after_s + 50


def test_unrecorded_recovery_does_not_end_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The catalog is unavailable right after the claim: rank 0 trains with the others, and logs a warning."""

    def fail(*_: object, **__: object) -> None:
        raise CatalogUnreachable("no answer")

    monkeypatch.setattr(startup, "_own_incident", fail)
    nothing = cast(Any, None)
    recoveries = OwnRecoveries(nothing, nothing, nothing)
    recoveries.begin(nothing, claimed_at=0.0)
    recoveries.fail()
    assert "no answer" in caplog.text
