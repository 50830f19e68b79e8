"""The end of a run leaves no process, hides no failure, and does not hang on a full disk."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from dlac_pipeline.lakehouse.ledger.typed_rows import FinishRow
from tests.conftest import Arena, wait_until


@pytest.mark.soak
def test_failure_after_last_batch_is_reported(campaign: Arena) -> None:
    """The run is finished in the ledger. The launch ends with the script's error, and not with success."""
    launch = campaign.launch(campaign.spec("afterwards", "fails_afterwards.py", passes=1, world_size=1))
    assert launch.wait() == 72
    (error,) = launch.of("error")
    assert "exporting the model failed" in error["message"]
    assert campaign.rows("afterwards", FinishRow)


@pytest.mark.soak
def test_children_of_ranks_die_with_supervisor(campaign: Arena) -> None:
    """SIGKILL of the supervisor: the ranks' own children end too, within 30 s."""
    launch = campaign.launch(campaign.spec("children", "has_children.py"))
    launch.wait_for("training")
    files = [campaign.home / "journal" / f"child-{rank}" for rank in range(2)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files), what="the ranks' children")
    children = [psutil.Process(int(file.read_text())) for file in files]
    os.kill(launch.process.pid, signal.SIGKILL)

    def have_ended() -> bool:
        return not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children)

    wait_until(have_ended, what="the end of the ranks' children", within_s=30)


@pytest.mark.soak
def test_full_store_under_deepspeed_blocks_no_rank(campaign: Arena, small_disk: Path) -> None:
    """DeepSpeed's save ends in a barrier. A rank that cannot write must reach it, and vote against the commit."""
    spec = campaign.spec("ds-full", "train_deepspeed.py", store=str(small_disk), every_steps=2, hang_timeout_s=60.0)
    launch = campaign.launch(spec)
    assert launch.wait() == 74, launch.events[-3:]
    (error,) = launch.of("error")
    assert error["kind"] == "StoreUnavailable"
