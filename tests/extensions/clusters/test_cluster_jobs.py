"""Following and judging the job of a cluster, with a scheduler whose answers the test chooses."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.extensions.clusters import cluster_job, slurm
from dlac_pipeline.extensions.clusters.cluster_job import SILENT_S, ClusterJob, NodeEvents
from dlac_pipeline.extensions.clusters.node_process import end_orphan
from dlac_pipeline.extensions.clusters.scheduler import JobState
from dlac_pipeline.extensions.clusters.slurm import Slurm
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import ClusterSilent, NoProgress, TrainingFailed
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import Attempt, claim, commit_checkpoint
from dlac_pipeline.lakehouse.ledger.commits import finish as commit_finish
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Outcome
from tests.extensions.clusters.cluster import (
    CANCELLED,
    COMPLETED,
    FAILED,
    GOOD,
    LOST,
    PENDING,
    PREEMPTED,
    RUNNING,
    Scripted,
    cluster_request,
)

pytestmark = pytest.mark.usefixtures("only_this_process")

RUN = GOOD["run"]
STEP = '{"event": "checkpoint", "step": 5}\n'
DONE = '{"event": "ended", "ending": "finished", "attempts": 2, "step": 9}\n'
LEFT = '{"event": "ended", "ending": "stopped", "attempts": 1, "step": 5}\n'
NO_PROGRESS = '{"event": "error", "kind": "NoProgress", "message": "three times"}\n'
FIRST, AGAIN = (f'{{"event": "node", "host": "n1", "start": "{number}"}}\n' for number in range(2))
Events = list[dict[str, Any]]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the lakehouse. Nodes have little time for their last events."""
    monkeypatch.setattr(cluster_job, "LISTENS_S", 0.5)
    return tmp_path


def job_of(
    home: Path,
    scheduler: Scripted,
    react: Callable[[dict[str, Any]], None] = lambda event: None,
    *,
    silent_s: float = SILENT_S,
    gone_s: float = 60.0,
) -> tuple[ClusterJob, Events]:
    """Return a job, and the events that it reports."""
    raw = cluster_request("slurm", {}, nodes="1", deadline_s=0.1).spec.model_dump() | {"lakehouse": {}}
    request = Request(spec=parse_spec(raw, origin="the test").resolved(home))
    events: Events = []

    def record(event: dict[str, Any]) -> None:
        events.append(event)
        react(event)

    return ClusterJob(request, scheduler, record, look_s=0.01, silent_s=silent_s, gone_s=gone_s), events


def commit(home: Path, step: int, *, finish: bool = False) -> None:
    """Commit the first checkpoint of the run."""
    ledger = Ledger(connect(LakehouseConfig().at_home(home)))
    claim(ledger, RUN, nonce="n1", replaces=0)
    rows = [CheckpointRow(checkpoint_id="c1", step=step)]
    attempt = Attempt(run=RUN, number=1, nonce="n1")
    commit_checkpoint(ledger, attempt, checkpoint_id="c1", parent=None, rows=rows)
    if finish:
        commit_finish(ledger, attempt, step=step)


def warnings_of(events: Events) -> list[str]:
    """Return the messages of the warnings."""
    return [event["message"] for event in events if event["event"] == "warning"]


def test_node_events_are_followed(home: Path) -> None:
    """Events are reported, and other lines are not. A node that reports the run finished outweighs the loss of another node."""
    log = f"hello\n{{\n{STEP}{LEFT}{DONE}{NO_PROGRESS}"
    job, events = job_of(home, Scripted(PENDING, RUNNING, COMPLETED, log=log))
    assert job.run() == Outcome(ending="finished", attempts=2, step=9)
    assert {"run": RUN, "event": "checkpoint", "step": 5} in events
    assert [event["state"] for event in events if event["event"] == "job"] == ["PENDING", "RUNNING", "COMPLETED"]
    assert events[0]["event"] == "submitted"


@pytest.mark.parametrize(
    ("answers", "log", "error", "message"),
    [
        ([FAILED], LEFT + NO_PROGRESS, NoProgress, "three times"),
        ([FAILED], NO_PROGRESS.replace("NoProgress", "ClassVar"), TrainingFailed, "ClassVar: three times"),
        *(
            ([state], "", TrainingFailed, f"job 7 to report how it ended, found {state.name} in Slurm")
            for state in (FAILED, COMPLETED)
        ),
        ([RUNNING, PREEMPTED], LEFT, TrainingFailed, "job 7 again after its preemption, found it ended at step 5"),
    ],
)
def test_unfinished_job_has_failed(
    home: Path, answers: list[JobState], log: str, error: type[Exception], message: str
) -> None:
    """The error is a node's, of another version too, or else names the state that Slurm reports."""
    commit(home, step=5)
    job, events = job_of(home, Scripted(*answers, log=log))
    with pytest.raises(error, match=message):
        job.run()
    assert [event["state"] for event in events if event["event"] == "job"][-1] == answers[-1].name


@pytest.mark.parametrize(
    ("answers", "log", "attempts", "step"), [([FAILED], LEFT, 0, 5), ([RUNNING, None], DONE, 2, 9)]
)
def test_finished_run_outweighs_scheduler(
    home: Path, answers: list[JobState | None], log: str, attempts: int, step: int
) -> None:
    """Slurm reports FAILED because a node was lost, or has forgotten the job. The ledger or the log know the end."""
    if FAILED in answers:
        commit(home, step=5, finish=True)
    job, _ = job_of(home, Scripted(*answers, log=log))
    assert job.run() == Outcome(ending="finished", attempts=attempts, step=step)


def test_requeued_job_is_followed(home: Path) -> None:
    """The job is over for one poll, waits in the queue, and ends as its last start did. Events of the first start are dropped."""

    def first_start() -> JobState:
        scheduler.log += AGAIN + LEFT
        return RUNNING

    scheduler = Scripted(RUNNING, FAILED, PENDING, first_start, COMPLETED, log=FIRST + NO_PROGRESS)
    job, events = job_of(home, scheduler)
    assert job.run() == Outcome(ending="stopped", attempts=1, step=5)
    states = [event["state"] for event in events if event["event"] == "job"]
    assert states == ["RUNNING", "FAILED", "PENDING", "RUNNING", "COMPLETED"]


AWAY = [ConnectionError("Unable to contact slurm controller")] * 8


@pytest.mark.parametrize(
    ("answers", "log", "call", "warning"),
    [
        ([RUNNING, LOST, PENDING, RUNNING, COMPLETED], DONE, "requeue", "has lost its first node"),
        ([RUNNING, *AWAY, RUNNING, COMPLETED], DONE, "", "Unable to contact"),
        ([RUNNING], FIRST + DONE, "cancel", ""),
        ([*[RUNNING] * 50, COMPLETED], FIRST + FIRST + DONE, "", ""),
    ],
    ids=["no process would end it", "scheduler away", "pods without room", "a script works after its run"],
)
def test_job_ends_as_its_nodes_report(
    home: Path, answers: list[JobState | Exception], log: str, call: str, warning: str
) -> None:
    """Only a job that nothing else would end is requeued or cancelled, once. An outage is reported once."""
    scheduler = Scripted(*answers, log=log)
    job, events = job_of(home, scheduler)
    assert job.run() == Outcome(ending="finished", attempts=2, step=9)
    assert [name for name in scheduler.calls if name in ("requeue", "cancel")] == ([call] if call else [])
    assert [warning in message for message in warnings_of(events)] == ([True] if warning else [])


def test_refused_requeue_cancels(home: Path) -> None:
    """On a cluster without requeueing the job is cancelled, and the run has failed."""
    scheduler = Scripted(LOST, CANCELLED)
    scheduler.refuses["requeue"] = [ConnectionError("Requested operation is presently disabled")]
    job, events = job_of(home, scheduler)
    with pytest.raises(TrainingFailed, match="found CANCELLED"):
        job.run()
    assert scheduler.calls.count("cancel") == 1
    assert any("presently disabled: it is cancelled" in message for message in warnings_of(events))


def test_unavailable_scheduler_ends_follow(home: Path) -> None:
    """The outage is reported once, and again at the end with the command that shows the job. The job is not cancelled."""
    scheduler = Scripted(RUNNING, PermissionError("the credentials have expired"))
    job, events = job_of(home, scheduler, silent_s=0.1)
    with pytest.raises(ClusterSilent, match=r"job 7, found PermissionError: .* left as it is.*dlac status"):
        job.run()
    (warning,) = warnings_of(events)
    assert re.search("answer about job 7, .*have expired; it is asked again", warning)
    assert "cancel" not in scheduler.calls


def test_cancel_works_without_state(home: Path) -> None:
    """The state and the cancellation are two commands. A failure of the first does not stop the second."""
    scheduler = Scripted(ConnectionError("away"))
    job, _ = job_of(home, scheduler)
    job.stop()
    with pytest.raises(ClusterSilent):
        job.run()
    assert "cancel" in scheduler.calls


def test_failed_cancel_is_repeated(home: Path) -> None:
    """The cancellation is repeated at the next poll, without waiting for the job's own deadline."""
    scheduler = Scripted(lambda: CANCELLED if scheduler.calls.count("cancel") == 2 else RUNNING)
    scheduler.refuses["cancel"] = [ConnectionError("away")]
    job, events = job_of(home, scheduler)
    job.stop()
    assert job.run().ending == "stopped"
    assert scheduler.calls.count("cancel") == 2
    assert len(warnings_of(events)) == 1


def test_unknown_job_has_ended(home: Path) -> None:
    """The first poll that does not find the job reports this, and does not end it."""
    job, events = job_of(home, Scripted(RUNNING, None), gone_s=0.1)
    with pytest.raises(TrainingFailed, match="to report how it ended"):
        job.run()
    assert any("to know job 7" in message for message in warnings_of(events))


def answer_with(monkeypatch: pytest.MonkeyPatch, answers: dict[str, str]) -> list[tuple[str, ...]]:
    """Make Slurm's commands answer by their name and first words, with an error if no answer is given. Return the commands."""
    calls: list[tuple[str, ...]] = []

    def answer(*command: str, script: str | None = None) -> str:
        calls.append(command)
        for words, text in answers.items():
            if " ".join(command).startswith(words):
                return text
        raise ConnectionError("slurm_load_jobs error: Invalid job id specified")

    monkeypatch.setattr(slurm, "answer_of", answer)
    return calls


@pytest.mark.parametrize(
    ("facts", "state"),
    [
        ("JobState=RUNNING PreemptTime=None NodeList=n[1-3] BatchHost=n1", RUNNING),
        ("JobState=RUNNING PreemptTime=None NodeList=n[2-3] BatchHost=n0", LOST),
        ("JobState=RUNNING PreemptTime=2026-11-23T08:38:48 BatchHost=n1", JobState(name="PREEMPTED")),
        ("JobState=COMPLETED PreemptTime=2026-11-23T08:38:48 BatchHost=n1", PREEMPTED),
        ("JobState=CANCELLED PreemptTime=2026-11-23T08:38:48 BatchHost=n1", CANCELLED),
        ("JobState=PENDING PreemptTime=2026-11-23T08:38:48 Restarts=1", PENDING),
    ],
    ids=["running", "first node lost", "being preempted", "preempted", "cancelled", "queued again"],
)
def test_slurm_facts_give_state(monkeypatch: pytest.MonkeyPatch, facts: str, state: JobState) -> None:
    """Slurm before 24.05 reports a preempted job as COMPLETED. A lost batch node is no state at all."""
    answer_with(monkeypatch, {"scontrol --oneliner": f"JobId=7 JobName=x {facts}\n", "scontrol show": "n1\nn2\nn3\n"})
    assert Slurm().state("7") == state


def test_slurm_asks_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that the controller has forgotten may be in the accounting, or may be unknown."""
    answer_with(monkeypatch, {"sacct": "CANCELLED by 0\n"})
    assert Slurm().state("7") == CANCELLED
    answer_with(monkeypatch, {})
    assert Slurm().state("7") is None


@pytest.mark.parametrize(("finished", "requested"), [(True, "scancel"), (False, "scontrol requeue")])
def test_orphaned_job_is_ended(monkeypatch: pytest.MonkeyPatch, finished: bool, requested: str) -> None:
    """The last node ends a job whose first node is lost. A node of any other job changes nothing."""
    facts = "JobId=7 JobState=RUNNING NodeList=n[2-3] BatchHost={}\n"
    answers = {"scontrol show": "n2\nn3\n", "scontrol requeue": "", "scancel": ""}
    calls = answer_with(monkeypatch, {"scontrol --oneliner": facts.format("n1"), **answers})
    end_orphan("7", finished=finished)
    assert " ".join(calls[-1]) == f"{requested} 7"
    calls = answer_with(monkeypatch, {"scontrol --oneliner": facts.format("n2"), **answers})
    end_orphan("7", finished=finished)
    assert len(calls) == 2


def test_events_share_a_line() -> None:
    """A log arrives in pieces, lines of several nodes may be joined, and a line may begin with its time."""
    events: Events = []
    node_events = NodeEvents(events.append)
    step = '{"event": "step", "step": 1}'
    node_events.read("", f"hello {{\n2026-11-23T09:00:00Z {step}{step[:9]}")
    assert events == []
    node_events.read("", f"{step[9:]}\n{LEFT}")
    assert (len(events), len(node_events.last_events)) == (2, 1)


def test_replacement_pod_starts_fresh() -> None:
    """A replacement pod has a new log. The end of the pod before it does not count."""
    node_events = NodeEvents(lambda event: None)
    node_events.read("0", FIRST + LEFT)
    node_events.read("1", FIRST + LEFT)
    node_events.read("1", AGAIN)
    assert len(node_events.last_events) == 1
    assert not node_events.all_ended
    node_events.read("1", NO_PROGRESS)
    assert [event["event"] for event in node_events.last_events] == ["ended", "error"]
