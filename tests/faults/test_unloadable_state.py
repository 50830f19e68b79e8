from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, QuarantinedCheckpointRow

pytestmark = pytest.mark.soak  # tests/process/test_engines.py saves the same state without a run
if TYPE_CHECKING:
    from tests.conftest import Arena

KINDS = [("torch", "synchronous"), ("dcp", "asynchronous")]


@pytest.mark.parametrize(("engine", "mode"), KINDS)
def test_numpy_learning_rate_is_resumed(campaign: Arena, engine: str, mode: str) -> None:
    """The checkpoints before a crash are loaded after it, and the run finishes."""
    run = f"numpy-{engine}"
    spec = campaign.spec(run, "train_numpy.py", world_size=1, passes=1, engine=engine, mode=mode, dies_at=25)
    launch = campaign.launch(spec)
    assert launch.wait() == 0, (launch.events[-3:], launch.stderr)
    first, second = (event["step"] for event in launch.of("attempt"))
    assert (first, second) in ((0, 10), (0, 20))  # the second one may not be committed yet in the background
    assert campaign.rows(run, QuarantinedCheckpointRow) == []


@pytest.mark.parametrize(("engine", "mode"), KINDS)
def test_unloadable_state_fails_first_checkpoint(campaign: Arena, engine: str, mode: str) -> None:
    """It is bad input at all ranks, and its place is named. Nothing is committed, and no other attempt starts."""
    run = f"array-{engine}"
    spec = campaign.spec(run, "train_numpy.py", engine=engine, mode=mode, schedule="yes")
    launch = campaign.launch(spec)
    assert launch.wait() == 64, (launch.events[-3:], launch.stderr)
    (error,) = launch.of("error")
    assert error["kind"] == "SpecInvalid"
    assert "found numpy.ndarray at optimizer" in error["message"]
    assert "schedule" in error["message"]
    assert len(launch.of("attempt")) == 1
    assert campaign.rows(run, CheckpointRow) == []
