"""A script that ends before its run: after a checkpoint if it ends between two steps, otherwise as a failure."""

import pytest

from dlac_pipeline.lakehouse.errors import LeftUnfinished, ScriptInvalid
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor
from tests.conftest import Arena

SCRIPT = """
import sys
import torch
import dlac_pipeline as dlac

with dlac.training_run() as run:
    run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
    for batch in run.batches():
        if batch.step == 18 and "in a step" in run.spec.params["ending"]:
            break
        if batch.step == 18 and "exits" in run.spec.params["ending"]:
            sys.exit(0)
        run.step_done(batch.mean(batch["x"].sum(-1)))
        if run.step == 15 and "between steps" in run.spec.params["ending"]:
            break
        if run.step == run.total_steps and "at the end" in run.spec.params["ending"]:
            break
"""
SILENT = """
import dlac_pipeline as dlac
from dlac_pipeline.lakehouse.errors import DlacError

try:
    with dlac.training_run() as run:
        for batch in run.batches():
            run.step_done(0.0)
except DlacError:
    pass
"""


def supervisor(arena: Arena, script: str, ending: str = "") -> Supervisor:
    """Return the supervisor of a run of one rank and 20 steps, with a checkpoint at every tenth."""
    path = arena.home / "script.py"
    path.write_text(script)
    return Supervisor(Request(spec=arena.spec("r", world_size=1, passes=1, script=str(path), ending=ending)))


def test_script_may_end_between_steps(arena: Arena) -> None:
    """A checkpoint of its last step is committed. The next start resumes there, and finishes the run exactly."""
    arena.table(appends=(640,))
    outcome = supervisor(arena, SCRIPT, "between steps").run()
    assert (outcome.ending, outcome.step) == ("left", 15)
    assert [row.step for row in arena.lineage("r")] == [10, 15]
    outcome = supervisor(arena, SCRIPT, "at the end").run()
    assert (outcome.ending, outcome.step) == ("finished", 20)
    assert sorted(row for rows in arena.recorded("r").values() for row in rows) == list(range(640))


def test_unrunnable_script_is_not_relaunched(arena: Arena) -> None:
    """Every attempt would end in the same way, so one is enough. Its error names the remedy, and is an incident."""
    arena.table(appends=(640,))
    with pytest.raises(ScriptInvalid, match="SyntaxError"):
        supervisor(arena, "def x(:").run()
    claims = arena.rows("r", ClaimRow)
    assert len(claims) <= 1
    assert [each.outcome for each in recoveries_of(arena.lakehouse, "r")] == ["gave up" for _ in claims]


@pytest.mark.parametrize(
    ("script", "ending", "message"),
    [
        (SCRIPT, "in a step", "at step 17"),
        pytest.param(SCRIPT, "exits", "at step 17", marks=pytest.mark.soak),
        pytest.param(SILENT, "", "run.restore", marks=pytest.mark.soak),
        pytest.param("", "", "exit status 0 at step 0", marks=pytest.mark.soak),
    ],
    ids=["in a step", "exits", "keeps an error to itself", "never touches DLAC"],
)
def test_script_ending_in_step_has_failed(arena: Arena, script: str, ending: str, message: str) -> None:
    """The script is not launched again, and committed checkpoints stay."""
    arena.table(appends=(640,))
    with pytest.raises(LeftUnfinished, match=message):
        supervisor(arena, script, ending).run()
    assert len(arena.rows("r", ClaimRow)) == 1
    assert [row.step for row in arena.rows("r", CheckpointRow)] == ([10] if ending else [])
