"""Real failures in `recoveries` and `dlac incidents`: their phases, replayed rows, and outcomes."""

import json

import pytest

from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from tests.conftest import Arena
from tests.integration.test_cli import dlac


@pytest.mark.soak
def test_rows_replayed_are_counted_not_estimated(arena: Arena) -> None:
    """A kill in the commit after a short last batch replays 32 + 12 rows, not two batches. The phases add up to the total."""
    arena.table(appends=(300,))
    sabotage = {"env": {"SABOTAGE": "kill-before-commit@10"}}
    launch = arena.launched(arena.spec("r", "train_sabotaged.py", passes=1, every_steps=4, **sabotage))
    (found,) = json.loads(dlac("incidents", "r", "--json", home=arena.home).stdout)
    assert (found["attempt"], found["replaced_attempt"], found["resumed_step"]) == (2, 1, 8)
    assert (found["rows_replayed"], found["outcome"], found["noticed_by"]) == (44, "resumed", "supervisor")
    assert "killed by SIGKILL" in found["cause"]
    assert (found["schedule_s"], found["convert_s"]) == (0.0, 0.0)
    assert 0 < found["work_lost_s"] < 60
    phases = ("detect", "schedule", "stop", "claim", "verify", "convert", "load", "first_step")
    assert sum(found[f"{phase}_s"] for phase in phases) == pytest.approx(found["total_s"], abs=1.0)
    shown = dlac("incidents", home=arena.home)
    assert shown.returncode == 0, shown.stderr
    assert all(text in shown.stdout for text in ("SIGKILL", "load", "44", "resumed"))
    assert dlac("incidents", "nobody", home=arena.home).returncode == 64
    assert launch.of("failure")[0]["phase"] == "checkpoint"
    assert [each.outcome for each in recoveries_of(arena.lakehouse, "r")] == ["resumed"]
    goodput = json.loads(dlac("status", "r", "--json", home=arena.home).stdout)["goodput"]
    assert goodput["down_s"] == pytest.approx(found["total_s"], abs=1e-3)
    assert goodput["replayed_s"] == pytest.approx(found["work_lost_s"], abs=1e-3)


@pytest.mark.soak
def test_coordinator_death_after_end_finishes_run(arena: Arena) -> None:
    """The next attempt has nothing to claim. The launch succeeds at the last step, and no step is trained again."""
    arena.table(appends=(300,))
    sabotage = {"env": {"SABOTAGE": "kill-after-finish@10"}}
    launch = arena.launched(arena.spec("r", "train_sabotaged.py", passes=1, every_steps=4, **sabotage))
    (ended,) = launch.of("ended")
    assert (ended["ending"], ended["step"], ended["attempts"]) == ("finished", 10, 2)
    assert len(arena.rows("r", ClaimRow)) == 1
