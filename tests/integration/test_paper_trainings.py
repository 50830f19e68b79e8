"""The trainings of benchmarks/paper, in small: killed for real, and compared with undisturbed ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper_parts import divergence
from benchmarks.paper_parts.divergence import BATCH, METHODS, SETTINGS, Effort
from benchmarks.paper_parts.summary import summarize
from benchmarks.peer_loaders import environments


@pytest.mark.slow
def test_only_dlac_ignores_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the losses of the undisturbed training, bit by bit. A loader without a state repeats rows and loses rows."""
    ours = {key: method for key, method in METHODS.items() if method.environment == environments.OWN}
    monkeypatch.setattr(divergence, "METHODS", ours)
    settings = (
        replace(SETTINGS["stream"], methods=tuple(ours)),
        replace(SETTINGS["fixed"], methods=("dlac_dataset",)),
    )
    effort = Effort(seeds=1, steps=30, faults=4, settings=settings, save_every=4, evaluate_every=10)
    outcomes = divergence.measure(effort, tmp_path / "paper", processes=1)
    assert [each.failed for each in outcomes if each.failed] == []
    found = {(each.setting, each.method): each for each in summarize(outcomes, BATCH)}
    deepspeed = found.pop(("stream", "deepspeed"))
    assert found.keys() == {("stream", "dlac"), ("stream", "dlac_dataset"), ("fixed", "dlac_dataset")}
    for each in found.values():
        assert (each.identical, each.excess, each.repeated, each.missing) == (1, 0, 0, 0)
        assert each.computed > 1
    assert deepspeed.identical == 0
    assert deepspeed.repeated == deepspeed.missing > 0
    assert {each.exact for each in outcomes if each.method == "dlac"} == {True}
