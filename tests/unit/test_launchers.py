from __future__ import annotations

import re
import shlex
import stat
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from dlac_pipeline.launchers.cluster import SILENT_S, ClusterJob
from torchx.schedulers.local_scheduler import LocalScheduler

from catalog.errors import ClusterSilent, NoProgress, SpecInvalid, TrainingFailed
from dlac_pipeline.launchers import cluster
from dlac_pipeline.launchers.protocol import launcher_for, rendered
from dlac_pipeline.recover.supervise import Outcome, Supervisor
from dlac_pipeline.request import Request
from dlac_pipeline.spec import parse_spec
from dlac_pipeline.supervisor.node import meeting_host, packed, unpacked
from tests.cluster import Processes, asked

SLURM = {"cpu": 8, "gpu": 4, "memory_mb": 64_000, "time_limit_s": 93_784, "partition": "h100", "account": "lm"} | {
    "options": {"constraint": "ib"},
    "env": {"NCCL_DEBUG": "WARN"},
    "retries": 2,
}
KUBERNETES = {"image": "registry.example/dlac:1", "cpu": 8, "gpu": 4, "memory_mb": 64_000, "queue": "train"} | {
    "namespace": "ml",
    "service_account": "trainer",
    "time_limit_s": 3600,
    "mounts": [
        {"source": "scratch", "path": "/scratch"},
        {"kind": "host", "source": "/d", "path": "/d", "read_only": True},
    ],
    "pod": {"spec": {"nodeSelector": {"pool": "h100"}}},
}


def test_a_slurm_job_has_a_supervisor_on_each_node_and_outlives_the_loss_of_some() -> None:
    """The script asks for nodes from least to most, warns them in time for a checkpoint, and ends nobody with somebody else."""
    script = rendered(asked("slurm", SLURM))
    (sbatch,) = re.findall(r"^#SBATCH (.*)$", script, re.MULTILINE)
    assert set(sbatch.split()) == {
        "--job-name=dlac-web-text-v2-0",
        "--requeue",
        "--nodes=2-4",
        "--ntasks-per-node=1",
        "--no-kill",
        "--signal=TERM@100",
        "--cpus-per-task=8",
        "--gpus-per-node=4",
        "--mem=64000",
        "--time=26:03:04",
        "--partition=h100",
        "--constraint=ib",
    }
    assert "sbatch --parsable --account=lm" in script
    assert "TORCHX_MAX_RETRIES=2" in script
    (srun,) = re.findall(r"^srun (.*)$", script, re.MULTILINE)
    words = shlex.split(srun)
    assert {"--wait=0", "--kill-on-bad-exit=0", "--no-kill", "--cpus-per-task=8", "--open-mode=append"} <= set(words)
    assert words[-3:] == ["python3", "-m", "dlac_pipeline.supervisor.node"]
    (export,) = [word.split(",") for word in words if word.startswith("--export=")]
    environment = dict(pair.split("=", 1) for pair in export[1:])
    assert environment["NCCL_DEBUG"] == "WARN"
    carried = unpacked(environment)
    assert carried.spec.launch.nproc_per_node == 4
    assert (carried.replaces, carried.launched_by) == (3, "dagster-run")
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0


def test_a_fixed_number_of_nodes_is_asked_for_as_that() -> None:
    """Without a range there is none in the script, and without accelerators the ranks are as the spec says."""
    script = rendered(asked("slurm", {}, nodes="3", nproc_per_node=2))
    assert "--nodes=3 " in script
    assert "gpus" not in script


def test_a_kubernetes_job_has_a_supervisor_in_each_pod_with_time_to_checkpoint() -> None:
    """Volcano begins with the least number of pods; each has the grace period, its mounts, and the request."""
    job = yaml.safe_load(rendered(asked("kubernetes", KUBERNETES)))
    tasks = job["spec"]["tasks"]
    assert (job["kind"], job["spec"]["queue"]) == ("Job", "train")
    assert [task["minAvailable"] for task in tasks] == [1, 1, 0, 0]
    pods = [task["template"]["spec"] for task in tasks]
    assert {pod["terminationGracePeriodSeconds"] for pod in pods} == {100}
    assert {pod["activeDeadlineSeconds"] for pod in pods} == {3600}
    assert {pod["serviceAccountName"] for pod in pods} == {"trainer"}
    assert {pod["restartPolicy"] for pod in pods} == {"Never"}
    assert {pod["shareProcessNamespace"] for pod in pods} == {True}
    assert all(pod["nodeSelector"] == {"pool": "h100"} for pod in pods)
    (container,) = pods[3]["containers"]
    assert container["image"] == "registry.example/dlac:1"
    assert container["command"] == ["python3", "-m", "dlac_pipeline.supervisor.node"]
    wanted = {"cpu": "8000m", "memory": "64000M", "nvidia.com/gpu": "4"}
    assert container["resources"] == {"limits": wanted, "requests": wanted}
    mounted = {mount["mountPath"]: mount.get("readOnly") for mount in container["volumeMounts"]}
    assert mounted == {"/dev/shm": None, "/scratch": False, "/d": True}
    carried = unpacked({one["name"]: one["value"] for one in container["env"]})
    assert carried.spec.launch.nproc_per_node == 4


@pytest.mark.parametrize(
    ("on", "cluster", "message"),
    [
        ("slurm", {"mounts": KUBERNETES["mounts"]}, r"expected no cluster\.mounts with launch\.on = 'slurm'"),
        ("slurm", {"namespace": "ml"}, r"expected no cluster\.namespace .* found 'ml'"),
        ("slurm", {"env": {"A": "1,2"}}, r"cluster\.env\.A without commas .* found '1,2'"),
        ("slurm", {"options": {"signal": "B:USR1"}}, r"cluster\.options .* found 'signal'"),
        ("slurm", {"options": {"--x": "1"}}, r"cluster\.options: expected plain names, found '--x'"),
        ("slurm", {"time_limit_s": -1}, r"cluster\.time_limit_s: .*found -1"),
        ("slurm", {"port": 80}, r"cluster\.port: .*found 80"),
        ("slurm", {"partitoin": "a"}, r"cluster\.partitoin: unknown field, did you mean 'partition'"),
        ("kubernetes", {}, r"expected cluster\.image"),
        ("kubernetes", {"image": "i", "partition": "a"}, r"expected no cluster\.partition .* found 'a'"),
        (
            "kubernetes",
            {"image": "i", "mounts": [{"source": "s", "path": "d"}]},
            r"cluster\.mounts\.0\.path: .*found 'd'",
        ),
        ("here", {}, r"expected launch\.on = 'slurm' or 'kubernetes'"),
        ("nomad", {}, r"launch\.on: .*found 'nomad'"),
    ],
)
def test_what_a_scheduler_cannot_do_is_refused_before_anything_is_submitted(
    on: str, cluster: dict[str, Any], message: str
) -> None:
    """Settings of another scheduler, values that it would cut or that say what DLAC says itself: by name, with what was found."""
    with pytest.raises(SpecInvalid, match=message):
        rendered(asked(on, cluster, rendezvous="h:1"))


def test_a_lakehouse_on_one_host_is_refused(tmp_path: Path) -> None:
    """The embedded catalog is not where nodes are."""
    request = asked("slurm", {})
    raw = request.spec.model_dump() | {"lakehouse": {}}
    with pytest.raises(SpecInvalid, match=r"expected lakehouse\.uri that the nodes of the job reach, found 'sqlite:"):
        launcher_for(Request(spec=parse_spec(raw, origin="the test").resolved(tmp_path)), print)


def test_without_a_scheduler_the_launcher_is_the_supervisor() -> None:
    """launch.on = "here" is what it always was."""
    assert isinstance(launcher_for(asked("here", {}, rendezvous="h:1"), print), Supervisor)


@pytest.mark.parametrize(
    ("environment", "host"),
    [
        ({}, "localhost"),
        ({"SLURM_JOB_NODELIST": "gpu07"}, "gpu07"),
        ({"SLURM_JOB_NODELIST": "gpu[01-04,07],cpu1"}, "gpu01"),
        ({"SLURM_JOB_NODELIST": "a1,b[2-3]"}, "a1"),
        ({"SLURM_JOB_NODELIST": "rack[2-3]node[08,11]-ib"}, "rack2node08-ib"),
        ({"VC_NODE_0_HOSTS": "job-node-0-0.job"}, "job-node-0-0.job"),
    ],
)
def test_nodes_meet_at_the_first_of_them(environment: dict[str, str], host: str) -> None:
    """Slurm's short form of its nodes, and Volcano's name of the first pod."""
    assert meeting_host(environment) == host


def test_a_request_travels_as_one_plain_word() -> None:
    """What carries it has no sign that a shell, Slurm or TorchX would read, and comes out as it went in."""
    request = asked("slurm", SLURM)
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", packed(request))
    assert unpacked({"DLAC_REQUEST": packed(request)}) == request
    for wrong in ({}, {"DLAC_REQUEST": "x"}, {"DLAC_REQUEST": packed(request)[:-9]}):
        with pytest.raises(SpecInvalid, match="expected a request of this DLAC"):
            unpacked(wrong)


STEP = '{"event": "checkpoint", "step": 5}'
DONE = '{"event": "ended", "ending": "finished", "attempts": 2, "step": 9}'
LEFT = '{"event": "ended", "ending": "stopped", "attempts": 1, "step": 5}'
NO_PROGRESS = '{"event": "error", "kind": "NoProgress", "message": "three times"}'


def job_of(
    folder: Path,
    *nodes: str,
    told: Callable[[dict[str, Any]], None] = lambda event: None,
    silent_s: float = SILENT_S,
) -> tuple[ClusterJob, list[dict[str, Any]]]:
    """A job of TorchX's local scheduler whose nodes are shell scripts, and what is passed on of it."""
    program = folder / "node"
    cases = "\n".join(f"*-{number}) {script};;" for number, script in enumerate(nodes))
    program.write_text(f'#!/bin/sh\ncase "node-$REPLICA" in\n{cases}\nesac\n')
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    request = asked(
        "kubernetes",
        {"image": str(folder), "python": str(program)},
        deadline_s=1,
        nodes=str(len(nodes)),
    )
    raw = request.spec.model_dump() | {"lakehouse": {}}
    request = Request(spec=parse_spec(raw, origin="the test").resolved(folder))
    events: list[dict[str, Any]] = []
    scheduler = Processes(request.spec, folder / "logs")

    def hear(event: dict[str, Any]) -> None:
        events.append(event)
        told(event)

    # Twice `look_s` is what the last words of nodes get behind the end of their job.
    return ClusterJob(request, scheduler, hear, look_s=0.4, silent_s=silent_s), events


def followed(folder: Path, *nodes: str) -> tuple[Outcome, list[dict[str, Any]]]:
    """How it is judged, and what was passed on of it."""
    job, events = job_of(folder, *nodes)
    return job.run(), events


def test_a_job_is_followed_by_what_its_nodes_say(tmp_path: Path) -> None:
    """Events come in, other lines do not; one node's word that the run is done outweighs another's loss."""
    outcome, events = followed(
        tmp_path,
        f"echo hello; echo '{{'; echo '{STEP}'; echo '{DONE}'",
        f"echo '{LEFT}'",
        f"echo '{NO_PROGRESS}'; exit 1",
    )
    assert outcome == Outcome(ending="finished", attempts=2, step=9)
    assert [event for event in events if event["event"] == "checkpoint"] == [
        {"run": "Web_text.v2", "event": "checkpoint", "step": 5}
    ]
    assert events[0]["event"] == "submitted"
    assert {event["event"] for event in events} == {"submitted", "job", "checkpoint"}


def test_a_job_whose_nodes_fail_ends_with_their_error(tmp_path: Path) -> None:
    """The class and message of what the nodes said, whoever left before."""
    with pytest.raises(NoProgress, match="three times"):
        followed(tmp_path, f"echo '{LEFT}'", f"echo '{NO_PROGRESS}'; exit 85")


def test_a_job_whose_nodes_name_an_error_of_another_version_ends_with_what_they_said(tmp_path: Path) -> None:
    """Whatever the name may mean here."""
    with pytest.raises(TrainingFailed, match="ClassVar: three times"):
        followed(tmp_path, f"echo '{NO_PROGRESS.replace('NoProgress', 'ClassVar')}'; exit 85")


def test_a_job_whose_nodes_say_nothing_failed(tmp_path: Path) -> None:
    """Not knowing how it ended is a failure that says where to look."""
    with pytest.raises(TrainingFailed, match=r"job local_cwd://.* found FAILED in local_cwd"):
        followed(tmp_path, "exit 7")


def fail(monkeypatch: pytest.MonkeyPatch, question: str, fails: Callable[[int], bool]) -> list[int]:
    """Have a scheduler fail those questions of a kind whose numbers say so; the numbers of all that were asked."""
    asked: list[int] = []
    answers = getattr(LocalScheduler, question)

    def answer(self: LocalScheduler, app_id: str) -> Any:
        asked.append(len(asked))
        if fails(asked[-1]):
            raise PermissionError("the credentials have expired")
        return answers(self, app_id)

    monkeypatch.setattr(LocalScheduler, question, answer)
    return asked


def test_a_scheduler_that_never_answers_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client waits on a network that has gone silent: that is no answer either."""
    ended = threading.Event()
    fail(monkeypatch, "describe", lambda number: not ended.wait())
    monkeypatch.setattr(cluster, "_ANSWERS_WITHIN_S", 0.3)
    job, _ = job_of(tmp_path, "exec sleep 30", silent_s=1.0)
    with pytest.raises(ClusterSilent, match="TimeoutError: no answer within"):
        job.run()
    ended.set()


def test_a_scheduler_that_answers_no_more_is_given_up_and_its_job_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it does not answer is said once; in the end, where the job can be looked at. Nobody has cancelled it."""
    cancelled = fail(monkeypatch, "cancel", lambda number: False)
    fail(monkeypatch, "describe", lambda number: True)
    job, events = job_of(tmp_path, "exec sleep 30", silent_s=1.0)
    with pytest.raises(ClusterSilent, match=r"job local_cwd://.*PermissionError: .* left as it is.*dlac status"):
        job.run()
    (warning,) = [event["message"] for event in events if event["event"] == "warning"]
    assert re.search("answer about job local_cwd://.*have expired; it is asked again", warning)
    assert not cancelled


def test_an_outage_of_the_scheduler_is_outlasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It answers again, and the run ends as its nodes say; that it was away was told of once."""
    away, warned = threading.Event(), threading.Event()
    behind: list[int] = []

    def fails(number: int) -> bool:
        """From the job's first state on, until it was asked eight times behind the warning."""
        if warned.is_set():
            behind.append(number)
        if len(behind) < 8:
            return away.is_set()
        (tmp_path / "done").touch()
        return False

    def told(event: dict[str, Any]) -> None:
        if event["event"] == "job":
            away.set()
        if event["event"] == "warning":
            warned.set()

    fail(monkeypatch, "describe", fails)
    job, events = job_of(tmp_path, f"while [ ! -e {tmp_path}/done ]; do sleep 0.1; done; echo '{DONE}'", told=told)
    assert job.run() == Outcome(ending="finished", attempts=2, step=9)
    assert [event["event"] for event in events].count("warning") == 1


def test_a_cancellation_that_fails_in_passing_is_repeated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job was not told to leave: it is told at the next look, not after the time that it would have had."""
    monkeypatch.setattr(cluster, "LISTENS_S", 1.0)
    asked = fail(monkeypatch, "cancel", lambda number: number == 0)
    job, events = job_of(tmp_path, f"sleep 30; echo '{DONE}'")
    job.stop()
    assert job.run().ending == "stopped"
    assert len(asked) == 2
    assert [event["event"] for event in events].count("warning") == 1


def test_what_stays_of_a_job_behind_its_finished_run_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an elastic job on Kubernetes: pods for which there was never room; no scheduler ends them."""
    monkeypatch.setattr(cluster, "LISTENS_S", 1.0)
    cancelled = fail(monkeypatch, "cancel", lambda number: False)
    job, _ = job_of(tmp_path, f"echo '{DONE}'", "exec sleep 300")
    assert job.run() == Outcome(ending="finished", attempts=2, step=9)
    assert cancelled


def test_nodes_that_still_work_behind_a_finished_run_are_not_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script may go on behind its run, on one node longer than on the others."""
    monkeypatch.setattr(cluster, "LISTENS_S", 0.2)
    cancelled = fail(monkeypatch, "cancel", lambda number: False)

    def told(event: dict[str, Any]) -> None:
        if event["event"] == "checkpoint":
            (tmp_path / "heard").touch()

    heard = f"while [ ! -e {tmp_path}/heard ]; do sleep 0.1; done"
    job, _ = job_of(tmp_path, f"{heard}; echo '{DONE}'", f"echo '{STEP}'; {heard}; sleep 3; echo '{DONE}'", told=told)
    assert job.run().ending == "finished"
    assert not cancelled


def test_a_fault_of_whoever_is_told_of_a_job_is_not_taken_for_the_schedulers(tmp_path: Path) -> None:
    """It ends the launcher, and is seen."""

    def told(event: dict[str, Any]) -> None:
        if event["event"] == "job":
            raise ZeroDivisionError

    job, _ = job_of(tmp_path, f"sleep 5; echo '{DONE}'", told=told)
    with pytest.raises(ZeroDivisionError):
        job.run()
