"""Killed in any phase of a checkpoint, under any engine, in both modes: the head is the old one or the new one, never torn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlac_pipeline.checkpoint.listing import verify_checkpoints

if TYPE_CHECKING:
    from tests.conftest import Arena

ENGINES = ["zero0", "zero1", "zero2", "zero3", "dcp"]
PHASES = ["copy", "write", "sync", "vote", "manifest", "before-commit", "after-commit"]
CELLS = [
    (engine, mode, phase)
    for engine in ENGINES
    for mode in ("synchronous", "asynchronous")
    for phase in PHASES
    if phase != "copy" or mode == "asynchronous"
]
STEPS = [10, 20, 30]


def check_cell(campaign: Arena, engine: str, mode: str, phase: str) -> None:
    """The first attempt dies in `phase` of the checkpoint of step 20; the second ends well, and everything agrees."""
    run = f"killed-{engine}-{mode[:4]}-{phase}"
    spec = campaign.spec(
        run,
        "train_killed.py",
        env={"KILL": f"{phase}@20", "ENGINE": "dcp" if engine == "dcp" else "zero", "DS_ACCELERATOR": "cpu"},
        stage=engine[-1] if engine != "dcp" else "0",
        passes=1,
        steps=30,
        mode=mode,
    )
    launch = campaign.launch(spec)
    assert launch.wait() == 0, launch.stderr
    first, second = launch.of("attempt")
    assert (first["step"], second["step"]) == (0, 20 if phase == "after-commit" else 10)

    assert [row["step"] for row in campaign.lineage(run)] == STEPS
    assert len(campaign.rows(run, "checkpoint")) == len(STEPS)
    assert all(verdict.problem is None for verdict in verify_checkpoints(campaign.lakehouse, run))
    journal, reference = campaign.journal(run), campaign.journal("reference")
    assert journal == {step: reference[step] for step in range(1, 31)}
    assert {step: sorted(rows) for step, rows in campaign.recorded(run).items()} == {
        last: sorted(row for step in range(last - 9, last + 1) for row in journal[step]) for last in STEPS
    }
    tries = [
        {(e["rank"], e["step"]): (e["rows"], e["loss"]) for e in campaign.entries(run) if e["attempt"] == attempt}
        for attempt in (1, 2)
    ]
    repeated = tries[0].keys() & tries[1].keys()
    assert {key: tries[0][key] for key in repeated} == {key: tries[1][key] for key in repeated}
    assert (1, 20) in repeated or phase == "after-commit"


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "mode", "phase"), CELLS)
def test_killed_in_a_phase(campaign: Arena, engine: str, mode: str, phase: str) -> None:
    """Half a file, half a copy, a manifest without its name: none of them is ever taken for a checkpoint."""
    check_cell(campaign, engine, mode, phase)
