from __future__ import annotations

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.conftest import Arena


def test_a_full_store_ends_the_run_and_loses_nothing(campaign: Arena, small_disk: Path) -> None:
    """The run ends of `StoreUnavailable` behind its last committed checkpoint; with more room it finishes, exact."""
    spec = campaign.spec("disk-full", store=str(small_disk))
    launch = campaign.launch(spec)
    assert launch.wait() == 74, launch.events[-3:]
    (error,) = launch.of("error")
    assert error["kind"] == "StoreUnavailable"
    assert str(small_disk) in error["message"]
    committed = campaign.lineage("disk-full")[-1]
    assert committed["step"] == launch.of("checkpoint")[-1]["step"] >= 10

    subprocess.run(["mount", "-o", "remount,size=10m", small_disk], check=True)
    again = campaign.launch(spec)
    assert again.wait() == 0, again.stderr
    assert again.of("attempt")[0]["step"] == committed["step"]
    assert campaign.rows("disk-full", "quarantine") == []
    assert campaign.journal("disk-full") == campaign.journal("reference")
    assert campaign.losses("disk-full") == campaign.losses("reference")
