"""The trainings of benchmarks/paper, in small: killed for real, and compared with undisturbed ones."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.paper_parts import divergence
from benchmarks.paper_parts.divergence import BATCH, METHODS, SETTINGS, Effort
from benchmarks.paper_parts.summary import summarize
from benchmarks.peer_loaders import environments
from benchmarks.peer_loaders.environments import Environment


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


@pytest.mark.slow
def test_dead_trainer_ends_its_training_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others continue in a new process."""
    script = "import sys; sys.stdin.readline(); sys.exit(3)"
    start, started = divergence._start, []

    def start_dead_first(environment: Environment, folder: Path) -> subprocess.Popen[str]:
        started.append(environment)
        if len(started) > 1:
            return start(environment, folder)
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", script], stdin=pipe, stdout=pipe, text=True)

    monkeypatch.setattr(divergence, "_start", start_dead_first)
    monkeypatch.setattr(divergence, "METHODS", {"dlac_dataset": replace(METHODS["dlac_dataset"], calm="")})
    setting = replace(SETTINGS["stream"], methods=("dlac_dataset",))
    effort = Effort(seeds=1, steps=12, faults=1, settings=(setting,), save_every=4, evaluate_every=6)
    faulted, calm = sorted(
        divergence.measure(effort, tmp_path / "paper", processes=1), key=lambda each: not each.faulted
    )
    assert faulted.failed == "RuntimeError: expected an answer of the trainer, found its end with status 3"
    assert (calm.failed, calm.trained) == ("", 12)
