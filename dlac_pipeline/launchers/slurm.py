"""Slurm: one batch script, rendered from `job.sbatch`, and the commands that submit, look at, requeue and cancel its job."""

from __future__ import annotations

import re
import shlex
import subprocess
from importlib.resources import files
from pathlib import Path
from string import Template

from dlac_pipeline.elastic.sealed_store import KEY_VARIABLE
from dlac_pipeline.launchers.scheduler import ANSWER_S, UNFINISHED_EXIT_CODE, JobState, leave_s, name_of, new_key
from dlac_pipeline.request import REQUEST_VARIABLE, Request, pack

_ENDED = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
}
_UNKNOWN = "Invalid job id"
"""Slurm's answer about a job that it does not know, or knows no longer. Any other failure is no answer."""


class Slurm:
    """One batch job with a task on each node. The job outlives the loss of any node but its first."""

    name = "Slurm"

    def __init__(self) -> None:
        self._log = Path()
        self._read_bytes = 0

    def render(self, request: Request) -> str:
        """Return the batch script."""
        launch, cluster = request.spec.launch, request.spec.cluster
        limit_s = cluster.time_limit_s
        options = {
            "partition": cluster.partition,
            "account": cluster.account,
            "gpus-per-node": cluster.gpu,
            "mem": cluster.memory_mb,
            "time": limit_s and f"{limit_s // 3600}:{limit_s // 60 % 60:02}:{limit_s % 60:02}",
        }
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
        lines += [f"#SBATCH --{name}={value}".rstrip("=") for name, value in cluster.options.items()]
        environment = {KEY_VARIABLE: new_key(), **cluster.env, REQUEST_VARIABLE: pack(request)}
        least, most = launch.min_nodes, launch.max_nodes
        return Template(files(__package__).joinpath("job.sbatch").read_text()).substitute(
            name=name_of(request),
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

    def submit(self, request: Request) -> str:
        """Submit the job and return its id."""
        job = _answer("sbatch", "--parsable", script=self.render(request)).strip().partition(";")[0]
        self._log, self._read_bytes = Path(f"slurm-{job}-nodes.out").absolute(), 0
        return job

    def state(self, job: str) -> JobState | None:
        """Return the job's state: what the controller knows, and after a while only the accounting."""
        try:
            facts = dict(re.findall(r"(\S+?)=(\S*)", _answer("scontrol", "--oneliner", "show", "job", job)))
        except ConnectionError as err:
            if _UNKNOWN not in str(err):
                raise
            return _accounted(job)
        name, preempted = facts["JobState"], facts.get("PreemptTime", "None") != "None"
        if preempted and name not in ("PENDING", "CANCELLED"):  # Slurm before 24.05 calls it COMPLETED or FAILED
            return JobState(name="PREEMPTED", over=name in _ENDED)
        lost = name == "RUNNING" and facts["BatchHost"] not in _expanded(facts["NodeList"])
        return JobState(name=name, over=name in _ENDED, first_node_lost=lost)

    def read(self, job: str) -> list[tuple[str, str]]:
        """Return what the nodes' common output has gained, in whole lines."""
        with self._log.open("rb") as stream:
            stream.seek(self._read_bytes)
            piece = stream.read()
        piece = piece[: piece.rfind(b"\n") + 1]
        self._read_bytes += len(piece)
        return [("", piece.decode(errors="replace"))]

    def requeue(self, job: str) -> None:
        """Have Slurm end the job and queue it again."""
        _answer("scontrol", "requeue", job)

    def cancel(self, job: str) -> None:
        """Cancel the job."""
        _answer("scancel", job)


def _accounted(job: str) -> JobState | None:
    """Return the state of a job that the controller has forgotten. A cluster without accounting knows nothing of it."""
    try:
        said = _answer("sacct", "--noheader", "--allocations", "--parsable2", "--format=State", f"--jobs={job}").split()
    except (ConnectionError, FileNotFoundError):
        return None
    return JobState(name=said[0], over=said[0] in _ENDED) if said else None


def _expanded(nodes: str) -> list[str]:
    """Return the names in Slurm's short form of a list of nodes."""
    return _answer("scontrol", "show", "hostnames", nodes).split()


def _answer(*command: str, script: str | None = None) -> str:
    """Run one of Slurm's commands; return its standard output.

    Raises:
        ConnectionError: it failed; the message is what it wrote to standard error.
    """
    done = subprocess.run(command, input=script, capture_output=True, text=True, check=False, timeout=ANSWER_S)
    if done.returncode:
        raise ConnectionError(done.stderr.strip() or f"{command[0]} ended with status {done.returncode}")
    return done.stdout
