"""The short soak campaign: every kind of fault once, on runs that a real Dagster trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak_faults.choosing import KINDS


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_every_fault_kind_is_healed(tmp_path: Path) -> None:
    """All runs finish, exact and with the losses of a run without faults. No process, lock, folder or file remains."""
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--quick", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, output
    campaign = json.loads(out.read_text())
    struck = {fault["kind"] for fault in campaign["faults"]}
    assert struck == KINDS.keys() - campaign["skipped"]
    assert sum(fault["summary"]["quarantined"] for fault in campaign["faults"]) == 2, output
    assert not any(campaign["left"].values())
