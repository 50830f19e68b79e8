from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 400 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(folder)]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    yield folder
    subprocess.run(["umount", folder], check=True)


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
