"""The trainings of benchmarks/paper, in small: killed for real, and compared with undisturbed ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.paper_parts import divergence
from benchmarks.paper_parts.divergence import BATCH, METHODS, SETTINGS, Effort
from benchmarks.paper_parts.summary import summarize
from benchmarks.peer_loaders import environments


@pytest.mark.slow
def test_only_dlac_ignores_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its losses are those of the undisturbed training, bit by bit. A loader without a state repeats rows and loses others."""
    ours = {key: method for key, method in METHODS.items() if method.environment == environments.OWN}
    monkeypatch.setattr(divergence, "METHODS", ours)
    effort = Effort(seeds=1, steps=30, faults=4, settings=SETTINGS[:1], save_every=4, evaluate_every=10)
    outcomes = divergence.measure(effort, tmp_path / "paper", processes=1)
    assert [each.failed for each in outcomes if each.failed] == []
    found = {each.method: each for each in summarize(outcomes, BATCH)}
    for name in ("dlac", "dlac_dataset"):
        assert (found[name].identical, found[name].excess, found[name].repeated, found[name].missing) == (1, 0, 0, 0)
    assert found["deepspeed"].identical == 0
    assert found["deepspeed"].repeated == found["deepspeed"].missing > 0
    assert found["dlac"].computed > 1
    assert {each.exact for each in outcomes if each.method == "dlac"} == {True}
