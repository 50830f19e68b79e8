from __future__ import annotations

import io
import os
import shlex
import stat
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dlac_pipeline.launchers.cluster import ClusterJob
from dlac_pipeline.launchers.hearing import Log
from dlac_pipeline.launchers.schedulers import Slurm

from catalog.commits import Attempt, claim, commit_checkpoint
from catalog.connect import connect
from catalog.errors import ClusterRefused, NoProgress, TrainingFailed
from catalog.lakehouse_config import LakehouseConfig
from catalog.ledger import Ledger
from catalog.run_rows import Row
from dlac_pipeline.launchers import cluster
from dlac_pipeline.recover.supervise import Outcome
from dlac_pipeline.request import Request
from dlac_pipeline.spec import parse_spec
from dlac_pipeline.supervisor.node import this_start
from dlac_pipeline.supervisor.orchestrator import say
from tests.cluster import GOOD, asked

RUN = GOOD["run"]

COMMANDS = {
    "sinfo": "echo slurm 24.05.8",
    "sacct": "echo Slurm accounting storage is disabled >&2; exit 1",
    "sbatch": """
        if [ -e refuse ]; then echo 'sbatch: error: invalid account' >&2; exit 1; fi
        echo 'sbatch: note' >&2
        for script; do :; done
        cp $script script.sh
        (SLURM_JOB_ID=7 bash script.sh; touch ended) >/dev/null 2>&1 &
        echo 7""",
    "srun": """
        for word; do
            case $word in
            --output=*) out=${word#--output=};;
            --*) ;;
            *) break;;
            esac
        done
        exec $word >> $out""",
    "squeue": """
        echo $1 >> asked
        if [ -e away ]; then echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1; fi
        if [ -e ended ]; then echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1; fi
        case $1 in --json) ;; *) echo 7; exit;; esac
        state=RUNNING
        if [ -e cancelled ]; then state=CANCELLED; fi
        nodes='"job_resources": {"nodes": {"list": "n1"}}'
        echo "{\\"jobs\\": [{\\"name\\": \\"dlac-r-0\\", \\"command\\": \\"x\\", \\"current_working_directory\\": \\"/\\","
        echo "\\"job_state\\": [\\"$state\\"], $nodes}]}" """,
    "scancel": "touch cancelled",
}
"""Of a Slurm without accounting, in the folder of the submission: `away`, `refuse`, `cancelled` and `ended` are its state."""
DONE = '{"event": "ended", "ending": "finished", "attempts": 2, "step": 9}'
LEFT = '{"event": "ended", "ending": "stopped", "attempts": 1, "step": 5}'
NO_PROGRESS = '{"event": "error", "kind": "NoProgress", "message": "three times"}'
Events = list[dict[str, Any]]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which jobs are submitted to Slurm's commands."""
    for name, script in COMMANDS.items():
        write(tmp_path / "bin" / name, script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setattr(cluster, "LISTENS_S", 5.0)
    return tmp_path


def write(program: Path, script: str) -> None:
    """A shell script that can be run."""
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!/bin/bash\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def job_of(
    folder: Path, node: str, told: Callable[[dict[str, Any]], None] = lambda event: None, *, gone_s: float = 60.0
) -> tuple[ClusterJob, Events]:
    """A job whose nodes are a shell script, and what is passed on of it."""
    write(folder / "node", node)
    request = asked("slurm", {"python": str(folder / "node")}, nodes="1", deadline_s=1)
    raw = request.spec.model_dump() | {"lakehouse": {}}
    request = Request(spec=parse_spec(raw, origin="the test").resolved(folder))
    events: Events = []

    def hear(event: dict[str, Any]) -> None:
        events.append(event)
        told(event)

    # Twice `look_s` is what the last words of nodes get behind the end of their job.
    return ClusterJob(request, Slurm(), hear, look_s=0.4, gone_s=gone_s), events


def commit(folder: Path, step: int) -> None:
    """Commit the first checkpoint of the run."""
    ledger = Ledger(connect(LakehouseConfig().at_home(folder)))
    claim(ledger, RUN, nonce="n1", replaces=0, detail={})
    rows: list[Row] = [{"kind": "checkpoint", "checkpoint_id": "c1", "parent": None, "step": step}]
    attempt = Attempt(run=RUN, number=1, nonce="n1")
    commit_checkpoint(ledger, attempt, checkpoint_id="c1", parent=None, rows=rows)


def until(name: str) -> str:
    """Of a shell script: wait for a file."""
    return f"for _ in {{1..600}}; do [ -e {name} ] && break; sleep 0.1; done"


def warnings_of(events: Events) -> list[str]:
    """What was warned of."""
    return [event["message"] for event in events if event["event"] == "warning"]


def test_a_controller_that_starts_again_has_not_ended_the_job(slurm: Path) -> None:
    """Its commands fail, and TorchX finds no job then: it is followed when they answer again, to its end."""

    def comes_back() -> None:
        (slurm / "away").unlink(missing_ok=True)
        (slurm / "go-on").touch()

    def told(event: dict[str, Any]) -> None:
        if event["event"] == "job":
            (slurm / "away").touch()
        if event["event"] == "warning":
            threading.Timer(1.0, comes_back).start()

    job, events = job_of(slurm, f"{until('go-on')}; echo '{DONE}'", told)
    assert job.run() == Outcome(ending="finished", attempts=2, step=9)
    assert "Unable to contact slurm controller" in warnings_of(events)[0]


def test_last_words_count_of_a_job_that_slurm_has_forgotten(slurm: Path) -> None:
    """Without accounting it forgets a job with its end; the log is there."""
    job, _ = job_of(slurm, f"echo '{DONE}'")
    assert job.run() == Outcome(ending="finished", attempts=2, step=9)


def test_a_job_that_slurm_does_not_know_for_a_while_has_ended(slurm: Path) -> None:
    """Not at the first look: that is told of. Nobody said why it ended."""
    job, events = job_of(slurm, "exit 7", gone_s=1.0)
    with pytest.raises(TrainingFailed, match="to say how it ended"):
        job.run()
    assert any("to know job" in message for message in warnings_of(events))


def test_a_job_that_commits_has_not_ended(slurm: Path) -> None:
    """Whatever Slurm knows of it: it is looked for once more."""

    def told(event: dict[str, Any]) -> None:
        if event["event"] == "job":
            (slurm / "ended").touch()
        if event["event"] == "warning":
            commit(slurm, step=5)

    job, _ = job_of(slurm, until("go-on"), told, gone_s=0.0)
    with pytest.raises(TrainingFailed):
        job.run()
    (slurm / "go-on").touch()
    assert (slurm / "asked").read_text().split().count("--noheader") == 3


def test_a_cancelled_job_that_says_nothing_stopped_where_the_ledger_is(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log may be lost; its checkpoint is not."""
    monkeypatch.setattr(cluster, "LISTENS_S", 1.0)
    commit(slurm, step=5)
    job, _ = job_of(slurm, until("cancelled"), gone_s=0.0)
    job.stop()
    outcome = job.run()
    assert (outcome.ending, outcome.step) == ("stopped", 5)


def test_a_cancelled_job_has_the_time_to_leave_behind_a_checkpoint(slurm: Path) -> None:
    """Slurm calls it cancelled at once; how it ended is what the nodes say then."""
    job, events = job_of(slurm, f"{until('cancelled')}; sleep 2; echo '{LEFT}'")
    job.stop()
    assert job.run() == Outcome(ending="stopped", attempts=1, step=5)
    assert {event["state"] for event in events if event["event"] == "job"} >= {"RUNNING"}


def test_a_job_is_cancelled_although_slurm_does_not_answer_about_it(slurm: Path) -> None:
    """Asking and cancelling are two commands."""

    def told(event: dict[str, Any]) -> None:
        if event["event"] == "job":
            (slurm / "away").touch()
            job.stop()

    job, events = job_of(slurm, f"{until('cancelled')}; echo '{LEFT}'", told)
    assert job.run() == Outcome(ending="stopped", attempts=1, step=5)
    assert len(warnings_of(events)) == 1


def test_a_job_that_is_queued_again_ended_as_its_last_start_did(slurm: Path) -> None:
    """The log goes on where it was; what nodes said at the end of an earlier start is past."""
    starts = [f'{{"event": "node", "host": "n1", "start": "{number}"}}' for number in range(2)]
    job, _ = job_of(
        slurm, "\n".join(f"echo '{line}'" for line in (starts[0], NO_PROGRESS, starts[1], LEFT)), gone_s=0.5
    )
    assert job.run() == Outcome(ending="stopped", attempts=1, step=5)
    (srun,) = [line for line in (slurm / "script.sh").read_text().splitlines() if line.startswith("srun ")]
    assert "--open-mode=append" in shlex.split(srun)


def test_why_sbatch_refuses_a_job_is_said(slurm: Path) -> None:
    """In its own words, which TorchX does not read."""
    (slurm / "refuse").touch()
    job, _ = job_of(slurm, "exit 0")
    with pytest.raises(ClusterRefused, match="found sbatch: error: invalid account; "):
        job.run()


def test_a_default_store_is_told_of(slurm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether all nodes reach it only the cluster knows."""
    monkeypatch.setenv("DLAC_HOME", str(slurm))
    spec = asked("slurm", {}).spec.resolved(slurm)
    assert not Slurm().doubts(spec)
    (doubt,) = Slurm().doubts(spec.model_copy(update={"checkpoint": type(spec.checkpoint)()}).resolved(slurm))
    assert f"checkpoints go to '{slurm}/checkpoints'" in doubt


def test_the_nodes_of_one_start_of_a_job_share_its_number() -> None:
    """On Slurm, where they share a log; a pod has its own, and each of its processes another number."""
    assert this_start({"SLURM_JOB_NODELIST": "n[1-2]"}) == "0"
    assert this_start({"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_RESTART_COUNT": "2"}) == "2"
    assert this_start({}) != this_start({})


def test_an_event_is_written_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever buffers standard output has: on Slurm the nodes share a file, and TorchX has Python unbuffered."""
    pieces: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str) -> int:
            pieces.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stdout", Stream())
    say({"event": "step"})
    assert pieces == ['{"event": "step"}\n']


def test_lines_are_heard_once_whole_and_one_by_one() -> None:
    """A long log comes in pieces, nodes' lines run together, and a line may be half there."""
    events: Events = []
    log = Log(events.append)
    step = '{"event": "step", "step": 1}'
    log.read(["hello {\n", step[:9], step[9:] + step + "\n", LEFT[:20]], last=False)
    assert (len(events), log.last_words) == (2, [])
    log.read(["hello {\n", step + step + "\n", LEFT], last=True)
    assert (len(events), len(log.last_words)) == (2, 1)


def test_a_log_that_begins_anew_is_heard_from_its_beginning() -> None:
    """A pod that is started again has a log of its own: how the one before ended is past."""
    events: Events = []
    log = Log(events.append)
    log.read(["1 a\n", "2 b\n", f"3 {LEFT}\n"], last=False)
    log.read([f"4 {NO_PROGRESS}\n", "5 c\n", "6 d\n", "7 e\n"], last=False)
    assert [words["kind"] for words in log.last_words] == [NoProgress.__name__]
