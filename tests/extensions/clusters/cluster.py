"""Requests for a cluster, and a scheduler without a cluster: its answers are given, and its calls are recorded."""

from collections.abc import Callable, Sequence
from typing import Any

from dlac_pipeline.extensions.clusters.scheduler import JobState
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from tests.conftest import Arena

GOOD: dict[str, Any] = {
    "run": "Web_text.v2",
    "source": {"table": "src.t", "columns": ["x"]},
    "order": {"batch_size": 32, "key_groups": 8},
    "launch": {"script": "/app/train.py", "nodes": "2:4", "deadline_s": 90},
    "checkpoint": {"store": "s3://bucket/checkpoints"},
    "lakehouse": {"uri": "postgresql+psycopg2://db/dlac", "warehouse": "s3://bucket/lake"},
}


SLURM: dict[str, Any] = {
    **{"cpu": 8, "gpu": 4, "memory_mb": 64_000, "time_limit_s": 93_784, "retries": 2},
    "options": {"partition": "h100", "account": "lm", "constraint": "ib"},
}
PENDING, RUNNING = JobState(name="PENDING"), JobState(name="RUNNING")
COMPLETED, FAILED, CANCELLED, PREEMPTED = (
    JobState(name=name, over=True) for name in ("COMPLETED", "FAILED", "CANCELLED", "PREEMPTED")
)
LOST = JobState(name="RUNNING", first_node_lost=True)
Answer = JobState | Exception | None | Callable[[], JobState | None]


def cluster_request(on: str, cluster: dict[str, Any], **launch: Any) -> Request:
    """Return a request for a job on a scheduler."""
    raw = {**GOOD, "launch": {**GOOD["launch"], "on": on, **launch}, "cluster": cluster}
    return Request(spec=parse_spec(raw, origin="the test"), replaces=3, launched_by="dagster-run")


def check_exact(arena: Arena, rows: int = 2000) -> None:
    """Check that the run "r1" consumed each row of its table once, by the script's journal and by the ledger."""
    for steps in (arena.journal("r1"), arena.recorded("r1")):
        assert sorted(row for step in steps.values() for row in step) == list(range(rows))


class Scripted:
    """A scheduler with a list of answers. Its last answer stays. An answer may be an error, or a function."""

    name = "Slurm"

    def __init__(self, *answers: Answer, log: str = "") -> None:
        self._answers = list(answers)
        self.log = log
        self.calls: list[str] = []
        self.near: list[str] = []
        """Preferred nodes of the job."""
        self.refuses: dict[str, list[Exception]] = {}
        """Errors of the next calls, by name."""

    def _record_call(self, name: str) -> None:
        self.calls.append(name)
        if self.refuses.get(name):
            raise self.refuses[name].pop(0)

    def check(self, spec: JobSpec) -> None:
        """Accept all settings."""

    def check_client(self) -> None:
        """Need no client."""

    def render(self, request: Request, near: Sequence[str] = ()) -> str:
        """Return no job."""
        return ""

    def submit(self, request: Request, near: Sequence[str]) -> str:
        """Accept the job."""
        self.near = [*near]
        self._record_call("submit")
        return "7"

    def state(self, job: str) -> JobState | None:
        """Return the next answer."""
        self._record_call("state")
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer() if callable(answer) else answer

    def read(self, job: str) -> list[tuple[str, str]]:
        """Return new lines of the log."""
        piece, self.log = self.log, ""
        return [("", piece)]

    def requeue(self, job: str) -> None:
        """Record the call."""
        self._record_call("requeue")

    def cancel(self, job: str) -> None:
        """Record the call."""
        self._record_call("cancel")
