import subprocess
from pathlib import Path

import pytest

from dlac_pipeline.lakehouse.ledger.typed_rows import QuarantinedCheckpointRow
from tests.conftest import Arena


@pytest.mark.slow
def test_frozen_table_needs_room_once(campaign: Arena, small_disk: Path) -> None:
    """All checkpoints of an attempt fit on a disk with room for one frozen table and a half."""
    subprocess.run(["mount", "-o", "remount,size=6m", small_disk], check=True)
    spec = campaign.spec("table", "train_fsdp2.py", store=str(small_disk), passes=1, every_steps=5, frozen_mb=4)
    launch = campaign.launch(spec)
    assert launch.wait() == 0, launch.stderr
    assert min(row.bytes or 0 for row in campaign.lineage("table")) > 4 << 20


@pytest.mark.parametrize("mode", [pytest.param("synchronous", marks=pytest.mark.soak), "asynchronous"])
def test_full_store_ends_run_without_loss(campaign: Arena, small_disk: Path, mode: str) -> None:
    """The run ends with `StoreUnavailable` after its last committed checkpoint. With more space it finishes, exact."""
    run = f"disk-full-{mode}"
    spec = campaign.spec(run, store=str(small_disk), mode=mode)
    launch = campaign.launch(spec)
    assert launch.wait() == 74, launch.events[-3:]
    (error,) = launch.of("error")
    assert error["kind"] == "StoreUnavailable"
    assert str(small_disk) in error["message"]
    committed = campaign.lineage(run)[-1]
    assert committed.step == launch.of("checkpoint")[-1]["step"] >= 10
    subprocess.run(["mount", "-o", "remount,size=10m", small_disk], check=True)
    assert campaign.launched(spec).of("attempt")[0]["step"] == committed.step
    assert campaign.rows(run, QuarantinedCheckpointRow) == []
    assert campaign.journal(run) == campaign.journal("reference")
    assert campaign.losses(run) == campaign.losses("reference")
