"""Under torchrun and the `deepspeed` launcher nobody supervises: the ranks leave in time by themselves; torchrun relaunches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
import yaml

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.operations.status import run_status
from tests.conftest import PROGRAMS, wait_until
from tests.faults.test_preemption import check_gone, metadata_server
from tests.ports import own_port

if TYPE_CHECKING:
    from tests.conftest import Arena

BIN = Path(sys.executable).parent
SCRIPTS = {"torchrun": "train_tiny.py", "deepspeed": "train_deepspeed.py"}


@dataclass(frozen=True, slots=True)
class Launched:
    """A launcher that trains a run, and its ranks."""

    process: subprocess.Popen[bytes]
    log: Path

    def ranks(self) -> list[psutil.Process]:
        """Its ranks, however far below it."""
        found = []
        for one in psutil.Process(self.process.pid).children(recursive=True):
            with suppress(psutil.Error):
                if "RANK" in one.environ() and any("tests/programs" in word for word in one.cmdline()[:3]):
                    found.append(one)
        return sorted(found, key=lambda one: one.pid)


@contextmanager
def launched(
    campaign: Arena, launcher: str, run: str, *, script: str = "", max_restarts: int = 0, **changes: object
) -> Iterator[Launched]:
    """Two ranks of a run under a launcher; nothing of it is left behind."""
    script = script or SCRIPTS[launcher]
    spec = campaign.spec(run, script, passes=1, **changes)
    job = campaign.home / f"{run}.yaml"
    job.write_text(yaml.safe_dump(spec.model_dump()))
    port = own_port()
    meets = ["--standalone", f"--max-restarts={max_restarts}"] if max_restarts else [f"--master-port={port}"]
    options = {
        "torchrun": ["--nproc-per-node=2", *meets],
        "deepspeed": ["--num_gpus=2", f"--master_port={port}"],
    }
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
        yield Launched(process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_for_ranks(campaign: Arena, under: Launched, run: str) -> list[psutil.Process]:
    """Wait until the run has committed a checkpoint; its ranks then."""

    def committed() -> bool:
        assert under.process.poll() is None, under.log.read_text()[-3000:]
        return len(campaign.entries(run)) >= 24 and bool(campaign.rows(run, "checkpoint"))

    wait_until(committed, what="a checkpoint")
    ranks = under.ranks()
    assert len(ranks) == 2
    return ranks


def check_left_and_finish(campaign: Arena, launcher: str, run: str, notice: str) -> None:
    """The head is the last finished step, as the notice asked for; the same launcher finishes the run exactly."""
    head = campaign.lineage(run)[-1]
    assert json.loads(head["detail"])["reason"] == notice
    assert head["step"] == max(entry["step"] for entry in campaign.entries(run)) < 63
    with launched(campaign, launcher, run) as again:
        assert again.process.wait(timeout=200) == 0, again.log.read_text()[-3000:]
    journal = campaign.journal(run)
    assert sorted(row for rows in journal.values() for row in rows) == list(range(2000))
    assert campaign.rows(run, "finish")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("launcher", "to", "number", "notice"),
    [
        ("torchrun", "launcher", signal.SIGTERM, "SIGTERM"),
        ("torchrun", "rank", signal.SIGUSR1, "SIGUSR1"),
        ("torchrun", "launcher", signal.SIGKILL, "launcher"),
        ("deepspeed", "rank", signal.SIGTERM, "SIGTERM"),
        ("deepspeed", "launcher", signal.SIGTERM, "launcher"),
    ],
)
def test_a_signal_leads_to_an_emergency_checkpoint(
    campaign: Arena, launcher: str, to: str, number: signal.Signals, notice: str
) -> None:
    """Whoever is signalled, and whether or not it passes the signal on: a checkpoint of the last step, and no process is left."""
    run = f"{launcher}-{to}-{number.name}"
    with launched(campaign, launcher, run, pause_s=0.2) as under:
        ranks = wait_for_ranks(campaign, under, run)
        os.kill(under.process.pid if to == "launcher" else ranks[1].pid, number)
        check_gone(ranks)
        under.process.wait(timeout=60)
        assert f"asked to exit ({notice})" in under.log.read_text()
    check_left_and_finish(campaign, launcher, run, notice)


@pytest.mark.soak
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_termination_url_leads_to_an_emergency_checkpoint(campaign: Arena, launcher: str) -> None:
    """One rank of the machine hears of it, all leave behind a checkpoint, and the launcher ends well."""
    run = f"{launcher}-url"
    with (
        metadata_server() as (url, gone, _),
        launched(campaign, launcher, run, pause_s=0.2, termination_url=url) as under,
    ):
        ranks = wait_for_ranks(campaign, under, run)
        gone.set()
        check_gone(ranks)
        assert under.process.wait(timeout=60) == 0, under.log.read_text()[-3000:]
        assert "asked to exit (termination_url)" in under.log.read_text()
    check_left_and_finish(campaign, launcher, run, "termination_url")


def test_relaunch_by_torchrun_leaves_incident(campaign: Arena) -> None:
    """A rank that is killed under torchrun is an incident: who noticed, since when, what was lost, and where it resumed.

    So is a run whose launcher is gone and that an operator starts again: the time until then is not the recovery's.
    """
    run = "torchrun-incidents"
    with launched(campaign, "torchrun", run, max_restarts=1, pause_s=0.1) as under:
        wait_until(partial(_commits, campaign, run, 1), what="a checkpoint of attempt 1")
        os.kill(under.ranks()[-1].pid, signal.SIGKILL)
        wait_until(partial(_commits, campaign, run, 2), what="a checkpoint of attempt 2")
        status = run_status(campaign.lakehouse, run)
        assert (status["launch"], status["total_steps"]) == ("training", 63)
        ranks = under.ranks()
        for number in (signal.SIGSTOP, signal.SIGKILL):  # at once: a rank that loses its launcher leaves in good order
            for pid in (under.process.pid, *(rank.pid for rank in ranks)):
                os.kill(pid, number)
        check_gone(ranks)
    dead = run_status(campaign.lakehouse, run)
    assert (dead["launch"], dead["next_command"]) == ("dead", f"dlac recover {run} --spec FILE")
    with launched(campaign, "torchrun", run, max_restarts=1) as again:
        assert again.process.wait(timeout=200) == 0, again.log.read_text()[-3000:]
    first, second = recoveries_of(campaign.lakehouse, run)
    assert [(each.noticed_by, each.outcome) for each in (first, second)] == [
        ("torchrun", "resumed"),
        ("operator", "resumed"),
    ]
    assert [(each.replaced_attempt, each.attempt) for each in (first, second)] == [(1, 2), (2, 3)]
    resumed = {row["checkpoint_id"]: row["step"] for row in campaign.rows(run, "checkpoint")}
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


@pytest.mark.soak
@pytest.mark.parametrize("script", ["train_tiny.py", "train_deepspeed.py"])
def test_torchrun_relaunches_what_was_killed(campaign: Arena, script: str) -> None:
    """Twice; each restart is an attempt that replaces the one before, and the run finishes exactly."""
    run = f"relaunched-{script}"
    with launched(campaign, "torchrun", run, script=script, max_restarts=2, pause_s=0.05) as under:
        for attempt in (1, 2):
            wait_until(partial(_commits, campaign, run, attempt), what=f"a checkpoint of attempt {attempt}")
            os.kill(under.ranks()[-1].pid, signal.SIGKILL)
        assert under.process.wait(timeout=200) == 0, under.log.read_text()[-3000:]
    assert [row["attempt"] for row in campaign.rows(run, "claim")] == [1, 2, 3]
    assert sorted(row for rows in campaign.journal(run).values() for row in rows) == list(range(2000))
    assert campaign.rows(run, "finish")


def _commits(campaign: Arena, run: str, attempt: int) -> bool:
    return any(row["attempt"] == attempt for row in campaign.rows(run, "checkpoint"))
