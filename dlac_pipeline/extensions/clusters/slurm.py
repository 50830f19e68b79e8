"""Slurm: one batch script, rendered from `job.sbatch`, and the commands that submit, look at, requeue and cancel its job.

Slurm has no option to prefer nodes. So a job requires the idle nodes among the ones with the newest checkpoint when it is
submitted, until it has been pending for half a minute (`scontrol update ReqNodeList=`).
"""

import re
import secrets
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from string import Template

from dlac_pipeline.elastic.sealed_store import KEY_VARIABLE
from dlac_pipeline.extensions.clusters.checks import check_slurm
from dlac_pipeline.extensions.clusters.packed_request import REQUEST_VARIABLE, pack
from dlac_pipeline.extensions.clusters.scheduler import ANSWER_S, UNFINISHED_EXIT_CODE, JobState, job_name, leave_s
from dlac_pipeline.extensions.clusters.settings import ClusterSpec
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import Request

_ENDED = {
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
}
_UNKNOWN = "Invalid job id"
"""Slurm's answer about a job that it does not know, or knows no longer. Any other failure is no answer."""
_NONE = "(null)"
PREFERS_S = 30.0
"""Seconds for which a pending job waits for the nodes that hold the newest checkpoint."""
_REFUSES_NODES = r"\bnodes?\b"
_PLACES = {"nodelist", "nodefile", "exclude"}
"""Options of sbatch by which the user places the job."""


class Slurm:
    """A batch job with a task on each node. The job outlives the loss of any node but its first."""

    name = "Slurm"

    def __init__(self, *, prefers_s: float = PREFERS_S) -> None:
        self._log = Path()
        self._read_bytes = 0
        self._prefers_s = prefers_s
        self._prefers = False
        """True if the job requires nodes only for a while."""
        self._pending_since: float | None = None

    def check(self, spec: JobSpec) -> None:
        """Raise `SpecInvalid` for a setting that Slurm would ignore or cut."""
        check_slurm(spec)

    def check_client(self) -> None:
        """Do nothing: Slurm is asked by commands."""

    def render(self, request: Request, near: Sequence[str] = ()) -> str:
        """Return the batch script of a job that requires the nodes in `near`."""
        launch, cluster = request.spec.launch, request.spec.section(ClusterSpec)
        limit_s = cluster.time_limit_s
        options = {
            "gpus-per-node": cluster.gpu,
            "mem": cluster.memory_mb,
            "nodelist": ",".join(near),
            "time": limit_s and f"{limit_s // 3600}:{limit_s // 60 % 60:02}:{limit_s % 60:02}",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
        lines += [f"#SBATCH --{name}={value}".rstrip("=") for name, value in cluster.options.items()]
        environment = {KEY_VARIABLE: secrets.token_hex(32), REQUEST_VARIABLE: pack(request)}
        least, most = launch.min_nodes, launch.max_nodes
        return Template(files(__package__).joinpath("job.sbatch").read_text()).substitute(
            name=job_name(request),
            nodes=most if least == most else f"{least}-{most}",
            cpu=cluster.cpu,
            leave_s=leave_s(request),
            options="\n".join(lines),
            environment="\n".join(f"export {name}={shlex.quote(value)}" for name, value in environment.items()),
            container=f"--container-image={shlex.quote(cluster.image)} " if cluster.image else "",
            python=shlex.quote(cluster.python),
            unfinished=UNFINISHED_EXIT_CODE,
            retries=cluster.retries,
        )

    def submit(self, request: Request, near: Sequence[str]) -> str:
        """Submit the job and return its id. It gets any nodes where Slurm refuses it on the idle ones of `near`."""
        cluster, most = request.spec.section(ClusterSpec), request.spec.launch.max_nodes
        idle = [] if _PLACES & set(cluster.options) else _idle(near, cluster.options.get("partition", ""))[:most]
        try:
            output = answer_of("sbatch", "--parsable", script=self.render(request, idle))
        except ConnectionError as err:
            if not idle or not re.search(_REFUSES_NODES, str(err)):
                raise
            idle = []
            output = answer_of("sbatch", "--parsable", script=self.render(request))
        job, self._prefers = output.strip().partition(";")[0], bool(idle)
        self._log, self._read_bytes = Path(f"slurm-{job}-nodes.out").absolute(), 0
        return job

    def state(self, job: str) -> JobState | None:
        """Return the job's state, from the controller, or after a while from the accounting alone."""
        try:
            facts = dict(re.findall(r"(\S+?)=(\S*)", answer_of("scontrol", "--oneliner", "show", "job", job)))
        except ConnectionError as err:
            if _UNKNOWN not in str(err):
                raise
            return _accounted(job)
        self._prefer_no_longer(job, facts)
        name, preempted = facts["JobState"], facts.get("PreemptTime", "None") != "None"
        if preempted and name not in ("PENDING", "CANCELLED"):  # Slurm before 24.05 calls it COMPLETED or FAILED
            return JobState(name="PREEMPTED", over=name in _ENDED)
        nodes = answer_of("scontrol", "show", "hostnames", facts["NodeList"]).split() if name == "RUNNING" else []
        lost = name == "RUNNING" and facts["BatchHost"] not in nodes
        return JobState(name=name, over=name in _ENDED, first_node_lost=lost)

    def _prefer_no_longer(self, job: str, facts: Mapping[str, str]) -> None:
        """Drop the nodes that a job requires if it is pending for too long, also one that is queued again after a loss."""
        if not self._prefers or facts["JobState"] != "PENDING" or facts.get("ReqNodeList", _NONE) == _NONE:
            self._pending_since = None
            return
        now = time.monotonic()
        self._pending_since = self._pending_since or now
        if now - self._pending_since >= self._prefers_s:
            with suppress(ConnectionError):  # it has just started
                answer_of("scontrol", "update", f"JobId={job}", "ReqNodeList=")

    def read(self, job: str) -> list[tuple[str, str]]:
        """Return the gain of the nodes' common output, in whole lines."""
        with self._log.open("rb") as stream:
            stream.seek(self._read_bytes)
            piece = stream.read()
        piece = piece[: piece.rfind(b"\n") + 1]
        self._read_bytes += len(piece)
        return [("", piece.decode(errors="replace"))]

    def requeue(self, job: str) -> None:
        """Have Slurm end the job and queue it again."""
        answer_of("scontrol", "requeue", job)

    def cancel(self, job: str) -> None:
        """Cancel the job."""
        answer_of("scancel", job)


def _idle(nodes: Sequence[str], partition: str) -> list[str]:
    """Return the idle nodes among the given ones, in their order. Empty if Slurm does not answer."""
    if not nodes:
        return []
    question = ["sinfo", "--noheader", "--Node", "--format=%N %t", f"--nodes={','.join(nodes)}"]
    try:
        output = answer_of(*question, *([f"--partition={partition}"] if partition else []))
    except (ConnectionError, OSError, subprocess.TimeoutExpired):
        return []
    idle = {name for name, _, state in (line.partition(" ") for line in output.splitlines()) if state.strip() == "idle"}
    return [node for node in nodes if node in idle]


def _accounted(job: str) -> JobState | None:
    """Return the state of a job that the controller has forgotten. A cluster without accounting knows nothing of it."""
    try:
        output = answer_of("sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={job}")
    except (ConnectionError, FileNotFoundError):
        return None
    states = output.split()
    return JobState(name=states[0], over=states[0] in _ENDED) if states else None


def answer_of(*command: str, script: str | None = None) -> str:
    """Run one of Slurm's commands. Return its standard output, or raise `ConnectionError` with its standard error."""
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    if done.returncode:
        raise ConnectionError(done.stderr.strip() or f"{command[0]} ended with status {done.returncode}")
    return done.stdout
