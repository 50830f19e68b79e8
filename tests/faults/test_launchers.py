"""Runs under torchrun and the `deepspeed` launcher, without a supervisor: ranks exit in time, and torchrun relaunches them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, FinishRow
from tests.conftest import PROGRAMS, Arena, wait_until
from tests.faults.test_preemption import check_gone, metadata_server
from tests.ports import own_port

BIN = Path(sys.executable).parent
SCRIPTS = {"torchrun": "train_tiny.py", "deepspeed": "train_deepspeed.py"}


@dataclass(frozen=True, slots=True)
class LaunchedRun:
    """A launcher that trains a run, and its ranks."""

    process: subprocess.Popen[bytes]
    log: Path

    def ranks(self) -> list[psutil.Process]:
        """Return its ranks, at any depth below it."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if "RANK" in one.environ() and any("tests/programs" in word for word in one.cmdline()[:3]):
                    found.append(one)
        return sorted(found, key=lambda one: one.pid)


@contextmanager
def launch_under(
    campaign: Arena, launcher: str, run: str, *, script: str = "", max_restarts: int = 0, **changes: object
) -> Iterator[LaunchedRun]:
    """Run two ranks under a launcher, and end all their processes."""
    script = script or SCRIPTS[launcher]
    spec = campaign.spec(run, script, passes=1, **changes)
    job = campaign.home / f"{run}.yaml"
    job.write_text(yaml.safe_dump(spec.model_dump()))
    port = own_port()
    meets = ["--standalone", f"--max-restarts={max_restarts}"] if max_restarts else [f"--master-port={port}"]
    options = {"torchrun": ["--nproc-per-node=2", *meets], "deepspeed": ["--num_gpus=2", f"--master_port={port}"]}
    environment = {**os.environ, "JOB_SPEC": str(job), "DLAC_HOME": str(campaign.home), "OMP_NUM_THREADS": "1"}
    log = campaign.home / f"{run}.log"
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [str(BIN / launcher), *options[launcher], str(PROGRAMS / script)],
            env={**environment, "DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        yield LaunchedRun(process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "to", "number", "notice"),
    [
        ("torchrun", "launcher", signal.SIGTERM, "SIGTERM"),
        ("torchrun", "rank", signal.SIGUSR1, "SIGUSR1"),
        ("torchrun", "launcher", signal.SIGKILL, "launcher"),
        ("torchrun", "url", None, "termination_url"),
        ("deepspeed", "rank", signal.SIGTERM, "SIGTERM"),
        ("deepspeed", "launcher", signal.SIGTERM, "launcher"),
        ("deepspeed", "url", None, "termination_url"),
    ],
)
def test_notice_causes_emergency_checkpoint(
    campaign: Arena, launcher: str, to: str, number: signal.Signals | None, notice: str
) -> None:
    """A signal reaches any process, or one rank reads the notice. The last step is saved, and no process remains."""
    run = f"{launcher}-{to}-{notice}-{number or 0:d}"
    with metadata_server() as (url, gone, _):
        changes: dict[str, Any] = {} if number else {"termination_url": url}
        with launch_under(campaign, launcher, run, pause_s=0.2, **changes) as launch:

            def committed() -> bool:
                assert launch.process.poll() is None, launch.log.read_text()[-3000:]
                return len(campaign.entries(run)) >= 24 and bool(campaign.rows(run, CheckpointRow))

            wait_until(committed, what="a checkpoint")
            ranks = launch.ranks()
            assert len(ranks) == 2
            if number:
                os.kill(launch.process.pid if to == "launcher" else ranks[1].pid, number)
            else:
                gone.set()
            check_gone(ranks)
            assert launch.process.wait(timeout=60) == 0 or number, launch.log.read_text()[-3000:]
            assert f"asked to exit ({notice})" in launch.log.read_text()
    head = campaign.lineage(run)[-1]
    assert head.reason == notice
    assert head.step == max(entry["step"] for entry in campaign.entries(run)) < 63
    with launch_under(campaign, launcher, run) as again:
        assert again.process.wait(timeout=200) == 0, again.log.read_text()[-3000:]
    assert sorted(row for rows in campaign.journal(run).values() for row in rows) == list(range(2000))
    assert campaign.rows(run, FinishRow)


@pytest.mark.soak
def test_relaunch_by_torchrun_leaves_incident(campaign: Arena) -> None:
    """A rank killed under torchrun, or a launch that an operator repeats, is an incident with detector, time and lost work."""
    run = "torchrun-incidents"
    with launch_under(campaign, "torchrun", run, max_restarts=1, pause_s=0.1) as launch:
        wait_until(partial(_commits, campaign, run, 1), what="a checkpoint of attempt 1")
        os.kill(launch.ranks()[-1].pid, signal.SIGKILL)
        wait_until(partial(_commits, campaign, run, 2), what="a checkpoint of attempt 2")
        status = run_status(campaign.lakehouse, run)
        assert (status["launch"], status["total_steps"]) == ("training", 63)
        ranks = launch.ranks()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stop first: a rank that loses its launcher exits in order
            for pid in (launch.process.pid, *(rank.pid for rank in ranks)):
                os.kill(pid, number)
        check_gone(ranks)
    dead = run_status(campaign.lakehouse, run)
    assert (dead["launch"], dead["next_command"]) == ("dead", f"dlac recover {run} --spec FILE")
    with launch_under(campaign, "torchrun", run, max_restarts=1) as again:
        assert again.process.wait(timeout=200) == 0, again.log.read_text()[-3000:]
    first, second = recoveries_of(campaign.lakehouse, run)
    assert [(each.noticed_by, each.outcome) for each in (first, second)] == [
        ("torchrun", "resumed"),
        ("operator", "resumed"),
    ]
    assert [(each.replaced_attempt, each.attempt) for each in (first, second)] == [(1, 2), (2, 3)]
    resumed = {row.checkpoint_id: row.step for row in campaign.rows(run, CheckpointRow)}
    for each in (first, second):
        done = max(entry["step"] for entry in campaign.entries(run) if entry["attempt"] == each.replaced_attempt)
        assert resumed[each.resumed_from or ""] == each.resumed_step
        steps = done - each.resumed_step  # a rank may be killed after its entry and before its heartbeat
        assert (steps - 1) * 32 <= each.rows_replayed <= (steps + 1) * 32
        parts = ("detect", "schedule", "stop", "claim", "verify", "convert", "load", "first_step")
        assert 0 < sum(getattr(each, f"{part}_s") or 0.0 for part in parts) <= each.total_s
    assert (first.down_s, second.down_s) == (0.0, second.detect_s)
    assert second.recovered_s == second.total_s - second.detect_s > 0
    assert audit_run(campaign.lakehouse, run).exact


def _commits(campaign: Arena, run: str, attempt: int) -> bool:
    return any(row.attempt == attempt for row in campaign.rows(run, CheckpointRow))
