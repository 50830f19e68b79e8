"""Fault injection as a command: `dlac chaos` strikes a run of a job, and audits it."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.errors import ScriptFailed, TrainingFailed
from dlac_pipeline.lakehouse.ledger.typed_rows import QuarantinedCheckpointRow
from tests.conftest import Arena, wait_until
from tests.forked import Forked
from tests.object_store import ObjectStore

CHAOS = [sys.executable, "-m", "dlac_pipeline.cli.main", "chaos"]
NODES = {"nodes": "2", "nproc_per_node": 1, "rendezvous": "node-1:29400", "memory": "/dev/shm"}
REPLICAS = {"program": "train_replicas.py", "replicas": 3, "world_size": 1}


def write_job(campaign: Arena, run: str, program: str = "train_tiny.py", **changes: Any) -> Path:
    """Write a job file."""
    path = campaign.home / f"{run}.yaml"
    path.write_text(yaml.safe_dump(campaign.spec(run, program, **changes).model_dump(mode="json", exclude_none=True)))
    return path


def chaos(campaign: Arena, run: str, *options: str, **job: Any) -> tuple[int, str, Path]:
    """Run `dlac chaos` on a job, and return its exit status, its output, and the file of its report."""
    out = campaign.home / f"{run}.json"
    command = [*CHAOS, str(write_job(campaign, run, **job)), "--home", str(campaign.home), "--out", str(out), *options]
    with Forked(command, env=marked(run), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        output, _ = process.communicate()
    return process.returncode, output, out


def marked(run: str) -> dict[str, str]:
    """Return an environment by which all processes of a run under chaos are found."""
    return {**os.environ, "TESTS_RUN": run}


def processes_of(run: str) -> list[str]:
    """Return the processes of a run under chaos that are left. A process that sets its title loses its environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            command = " ".join(process.cmdline())
            is_own = f"dlac {run}-chaos " in command or process.environ().get("TESTS_RUN") == run
            if is_own and process.status() != psutil.STATUS_ZOMBIE:
                found.append(command)
    return found


@pytest.mark.slow
def test_faults_of_three_kinds_are_healed(campaign: Arena) -> None:
    """A killed rank, a killed supervisor and a damaged checkpoint: the run finishes, and its audit is exact."""
    kills = ("--kill", "rank:1@step=7", "--kill", "supervisor@step=20", "--kill", "checkpoint@step=35")
    code, output, out = chaos(campaign, "three", *kills, "--steps", "60", pause_s=0.05)
    assert code == 0, output
    report = json.loads(out.read_text())
    assert [fault["kind"] for fault in report["faults"]] == ["rank", "supervisor", "checkpoint"]
    assert report["healed"]
    assert report["audit"]["exact"]
    assert report["audit"]["finished"]
    assert "3 of 3 faults healed" in output
    assert len(campaign.rows("three-chaos", QuarantinedCheckpointRow)) == 1
    undisturbed = {step: rows for step, rows in campaign.journal("reference").items() if step <= 60}
    assert campaign.journal("three-chaos") == undisturbed
    assert campaign.losses("three-chaos") == campaign.losses("reference")[:60]
    assert campaign.head("three") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "within", "status", "found"),
    [
        ("train_raising.py", "300s", ScriptFailed.exit_code, "the scratch disk is not empty"),
        (
            "train_tiny.py",
            "500ms",
            TrainingFailed.exit_code,
            "within 0.5 s: (no new step since|processes .* still run)",
        ),
    ],
)
def test_unhealed_fault_ends_run(campaign: Arena, program: str, within: str, status: int, found: str) -> None:
    """The message names the fault and the cause. No process of the run is left, and the audit covers what was trained."""
    run = f"unhealed-{program[:-3]}"
    options = ("--kill", "supervisor@step=11", "--healed-within", within)
    code, output, out = chaos(campaign, run, *options, program=program, pause_s=0.05, bug="second_attempt")
    assert code == status, output
    assert "fault 1 (supervisor: SIGKILL to the supervisor) was not healed" in output
    assert re.search(found, output)
    assert not json.loads(out.read_text())["healed"]
    assert processes_of(run) == []


@pytest.mark.slow
def test_signal_ends_all_processes(campaign: Arena) -> None:
    """Two signals to the command during an outage end every process that it started, and the catalog is moved back."""
    path = write_job(campaign, "ended", pause_s=0.05)
    command = [*CHAOS, str(path), "--home", str(campaign.home), "--kill", "catalog@step=3", "--away", "60s"]
    with Forked(command, env=marked("ended")) as process:
        wait_until((campaign.home / "catalog.db").is_dir, what="the outage")
        process.send_signal(signal.SIGHUP)
        process.terminate()
        assert process.wait(60) in (128 + signal.SIGHUP, 128 + signal.SIGTERM)  # SIGHUP may be ignored here
    assert (campaign.home / "catalog.db").is_file()
    assert processes_of("ended") == []
    assert campaign.head("ended-chaos") is None or audit_run(campaign.lakehouse, "ended-chaos").exact


@pytest.mark.soak
@pytest.mark.parametrize(
    ("name", "options", "changes"),
    [
        ("outages", ("--kill", "store@step=12", "--kill", "catalog@step=30", "--away", "3s"), {"every_steps": 2}),
        ("memory", ("--kill", "node@step=15", "--kill", "ranks@step=40"), {"memory": "/dev/shm"}),
        ("leaves", ("--kill", "preempt@step=15", "--kill", "hang@step=40"), {"hang_timeout_s": 5}),
        ("cascade", ("--every", "1s", "--faults", "2", "--cascade", "3", "--seed", "3"), {}),
        ("nodes", ("--kill", "node@step=15", "--kill", "preempt@step=40"), NODES),
        ("replicas", ("--kill", "rank@step=15", "--kill", "supervisor@step=40"), REPLICAS),
    ],
)
def test_faults_of_other_kinds_are_healed(
    campaign: Arena, name: str, options: tuple[str, ...], changes: dict[str, Any]
) -> None:
    """Outages, lost nodes and their memory, preemptions, hangs and cascades, on one node and on several."""
    code, output, out = chaos(campaign, name, *options, "--steps", "100", pause_s=0.1, **changes)
    assert code == 0, output
    report = json.loads(out.read_text())
    assert len(report["faults"]) == (6 if name == "cascade" else 2)
    assert report["audit"]["finished"]
    assert processes_of(name) == []


@pytest.mark.soak
def test_cut_network_is_healed(campaign: Arena, store: ObjectStore) -> None:
    """A proxy stands before the store. The catalog of local files has none."""
    settings = {"store": "s3://lake/checkpoints", "store_properties": store.properties(), "every_steps": 2}
    kills = ("--kill", "network@step=12", "--kill", "network@step=25", "--kill", "store@step=40", "--seed", "12")
    code, output, _ = chaos(campaign, "network", *kills, "--away", "3s", "--steps", "60", pause_s=0.1, **settings)
    assert code == 0, output
    for outage in ("silent for 3 s", "cut for 3 s", "connections to the store cut"):
        assert outage in output
