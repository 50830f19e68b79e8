"""Fault injection as a command: `dlac chaos` strikes a run of a job, and audits it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.typed_rows import QuarantinedCheckpointRow

if TYPE_CHECKING:
    from tests.conftest import Arena


def chaos(
    campaign: Arena, run: str, *options: str, program: str = "train_tiny.py", **changes: Any
) -> tuple[int, str, Path]:
    """Run `dlac chaos` on a job, and return its exit status, its output, and the file for its report."""
    spec = campaign.spec(run, program, **changes)
    path, out = campaign.home / f"{run}.yaml", campaign.home / f"{run}.json"
    path.write_text(yaml.safe_dump(spec.model_dump(mode="json", exclude_none=True)))
    command = [sys.executable, "-m", "dlac_pipeline.cli.main", "chaos", str(path), "--home", str(campaign.home)]
    done = subprocess.run([*command, "--out", str(out), *options], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr, out


def test_faults_of_three_kinds_are_healed(campaign: Arena) -> None:
    """A killed rank, a killed supervisor and a damaged checkpoint: the run finishes, and its audit is exact."""
    kills = ("--kill", "rank:1@step=15", "--kill", "supervisor@step=35", "--kill", "checkpoint@step=55")
    code, output, out = chaos(campaign, "three", *kills, pause_s=0.05)
    assert code == 0, output
    report = json.loads(out.read_text())
    assert [fault["kind"] for fault in report["faults"]] == ["rank", "supervisor", "checkpoint"]
    assert report["healed"]
    assert audit_run(campaign.lakehouse, "three-chaos").finished
    assert len(campaign.rows("three-chaos", QuarantinedCheckpointRow)) == 1
    assert campaign.journal("three-chaos") == campaign.journal("reference")
