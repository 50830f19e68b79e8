"""The parts of `benchmarks.gpu` that compute and write, without a measurement."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.figures import Figure
from benchmarks.gpu_parts.loading import loading_figures
from benchmarks.gpu_parts.page import page_of

_ON_CPU = {
    "device": "cpu",
    "name": "2 cores",
    "count": 0,
    "backend": "gloo",
    "torch": "2.13",
    "system": "2 cores, Linux",
}
_ON_GPU = {**_ON_CPU, "device": "cuda", "name": "NVIDIA H200", "count": 1, "backend": "nccl"}


def result_on(machine: dict[str, Any], **figures: Figure) -> dict[str, Any]:
    """Return the result of a measurement, with some figures."""
    shown = {"load_average_1min": Figure(value=1.0, unit="processes"), **figures}
    return {
        "machine": machine,
        "quick": False,
        "sizes": {"model": {"layers": 2, "d_model": 64, "batch": 16, "length": 129}, "memory": {"100M": {}}},
        "day": "2026-11-23",
        "minutes": 12.3,
        "kernels": {"kernels": ["cumsum_cuda_kernel"], "differing_gradients": ["token.weight"], "parameters": 28},
        "failed": {"checkpoints": "RuntimeError: no room"},
        "figures": {name: figure.to_json() for name, figure in shown.items()},
    }


def test_page_shows_what_failed() -> None:
    """The page shows a failed part, a missed bar, and kernels by name."""
    missed = Figure(value=3, unit="steps", bar="<= 0")
    kept = Figure(value=1.01, unit="ratio", bar="<= 1.02")
    repeated = Figure(value=4, unit="batches", bar="<= 2")
    found = {"checkpoint_with_over_without": kept, "memory_100M_replayed": repeated}
    page = page_of(result_on(_ON_GPU, demo_differing_losses_deterministic=missed, **found))
    assert "- **checkpoints failed:** RuntimeError: no room" in page
    assert "| 3 | <= 0, **missed** |" in page
    assert "| 1.01 | <= 1.02 |" in page
    assert "| batches repeated, at the most | 4 | <= 2, **missed** |" in page
    assert "- `cumsum_cuda_kernel`" in page
    assert "Of 28 parameters 1 have another gradient when the step is repeated: token.weight." in page


def test_loading_compares_pairs() -> None:
    """Ratios compare the segments of one round. The time of a step beyond that without a reader is the reader's."""

    def segments(*seconds: float) -> list[dict[str, float]]:
        return [{"seconds": each, "waited_s": 0.1 * each} for each in seconds]

    sides = {
        "plain": segments(2.0, 4.0, 8.0),
        "copied": segments(1.0, 2.0, 4.0),
        "held": segments(0.5, 1.0, 2.0),
        "plain again": segments(2.0, 4.0, 12.0),
    }
    figures = loading_figures({"segments": sides, "steps": 10, "differing": 1, "parameters": 5})
    values = {name: figure.value for name, figure in figures.items()}
    assert (values["copied_over_plain"], values["data_share_of_step"]) == (0.5, 50.0)
    assert (values["plain_over_plain"], values["plain_over_plain_spread"]) == (1.0, 0.25)
    assert values["host_waits_for_batch"] == pytest.approx(10.0)
    assert not figures["loading_batches_differing"].holds
