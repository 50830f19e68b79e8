"""Programs of the paper's page, at their smallest size: real runs, real kills."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import failures, overhead
from benchmarks.intervals import measured_of, train_in_blocks


@pytest.mark.slow
def test_each_failure_is_recovered_exactly(tmp_path: Path) -> None:
    """Both runs have the losses of the undisturbed run. Without states in memory each failure resumes from the store."""
    figures = failures.measure(tmp_path, table_bytes=40_000_000, rounds=1)
    assert [name for name, figure in figures.items() if not figure.holds] == []
    assert figures["state_bytes"].value > 40_000_000
    for source in failures.SOURCES:
        assert figures[f"{source}_losses_compared"].value > 0
        for kind in failures.FAILURES:
            assert figures[f"{source}_{kind}_recovery_s"].value >= figures[f"{source}_{kind}_restart_s"].value > 0
    assert figures["memory_single_from_memory"].value + figures["memory_concurrent_from_memory"].value > 0
    assert figures["store_single_from_memory"].value == 0


@pytest.mark.slow
def test_checkpoints_are_in_every_other_block(tmp_path: Path) -> None:
    """A block with checkpoints has two of them, and is between two that take none."""
    params = {"width": "96", "layers": "1", "vocabulary": "64", "tokens": "4"}
    raw = train_in_blocks(tmp_path, params, interval_s=1.0, pairs=1)
    counts = [
        sum(block["first"] <= event["step"] < block["last"] for event in raw["checkpoints"]) for block in raw["blocks"]
    ]
    assert counts == [1, 2, 0]  # the first one is there before the first block
    assert measured_of(1.0, raw).at_risk_s >= 1


@pytest.mark.slow
def test_steps_have_given_length(tmp_path: Path) -> None:
    """Each rank computes for at least so long."""
    load = overhead.Load(tag="20ms", key_groups=16, steps=3, batch_size=16, step_ms=20, most_share=100.0, pairs=2)
    figures = overhead.measure(tmp_path, load)
    assert figures["step_ms_20ms"].value >= 20
    assert figures["tracking_us_per_step_20ms"].value > 0
