"""A kill in any phase of a checkpoint, with any engine, in both modes: the head is old or new, and never torn."""

import pytest

from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.kept_checkpoints.listing import verify_checkpoints
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
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
SEVERAL = [phase for phase in PHASES if phase not in ("sync", "vote")]
"""Phases of one run. The other two leave what `write` leaves: some files, and no manifest."""
QUICK = SEVERAL[-3:]
"""Phases of `make test`: those around the commit."""
EVERY = 5
"""Steps between two checkpoints."""


def check_cell(campaign: Arena, engine: str, mode: str, *phases: str) -> None:
    """Check a run whose attempts die in these phases, each in its second checkpoint, and whose last attempt succeeds."""
    run = f"killed-{engine}-{mode[:4]}-{'-'.join(phases)}"
    deaths = {phase: (2 + number) * EVERY for number, phase in enumerate(phases)}
    last = (2 + len(phases)) * EVERY
    kills = ",".join(f"{phase}@{step}" for phase, step in deaths.items())
    of_engine = {"preload": [], "stage": "0"} if engine == "dcp" else {"preload": ["deepspeed"], "stage": engine[-1]}
    env = {"KILL": kills, "ENGINE": "dcp" if engine == "dcp" else "zero", "DS_ACCELERATOR": "cpu"}
    steps_of = {"passes": 1, "every_steps": EVERY, "steps": last, "frozen_mb": 4}
    spec = campaign.spec(run, "train_killed.py", env=env, mode=mode, **of_engine, **steps_of)
    if engine == "dcp":  # with a frozen table, to which later checkpoints of an attempt refer
        places = {"store": str(campaign.home / "far"), "keep_last": 2}
        spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=places)})
    launch = campaign.launched(spec)
    resumed = [step if phase == "after-commit" else step - EVERY for phase, step in deaths.items()]
    assert [event["step"] for event in launch.of("attempt")] == [0, *resumed]
    steps = list(range(EVERY, last + 1, EVERY))
    assert [row.step for row in campaign.lineage(run)] == steps
    assert len(campaign.rows(run, CheckpointRow)) == len(steps)
    assert any(row.refers_to for row in campaign.lineage(run)) == (engine == "dcp")
    verdicts = verify_checkpoints(campaign.lakehouse, run, files=tiers_of(spec).files)
    assert all(verdict.problem is None for verdict in verdicts)
    journal, reference = campaign.journal(run), campaign.journal("reference")
    assert journal == {step: reference[step] for step in range(1, last + 1)}
    assert {step: sorted(rows) for step, rows in campaign.recorded(run).items()} == {
        end: sorted(row for step in range(end - EVERY + 1, end + 1) for row in journal[step]) for end in steps
    }
    tries: dict[int, dict[tuple[int, int], object]] = {}
    for entry in campaign.entries(run):
        tries.setdefault(entry["attempt"], {})[entry["rank"], entry["step"]] = (entry["rows"], entry["loss"])
    for attempt, (phase, step) in enumerate(deaths.items(), 1):
        repeated = tries[attempt].keys() & tries[attempt + 1].keys()
        assert {key: tries[attempt][key] for key in repeated} == {key: tries[attempt + 1][key] for key in repeated}
        assert (1, step) in repeated or phase == "after-commit"


@pytest.mark.parametrize(
    ("engine", "phases"),
    [("dcp", QUICK), *(pytest.param(engine, SEVERAL, marks=pytest.mark.slow) for engine in ("dcp", "zero1"))],
)
def test_each_phase_survives_kill(campaign: Arena, engine: str, phases: list[str]) -> None:
    """Attempts of one run die, each in another phase of a checkpoint. No incomplete checkpoint is ever restored."""
    check_cell(campaign, engine, "asynchronous", *phases)


@pytest.mark.soak
@pytest.mark.parametrize(("engine", "mode", "phase"), CELLS)
def test_kill_in_any_phase(campaign: Arena, engine: str, mode: str, phase: str) -> None:
    """A partial file, a partial copy, or a manifest without its final name is never taken for a checkpoint."""
    check_cell(campaign, engine, mode, phase)
