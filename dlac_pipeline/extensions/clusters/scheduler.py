"""The interface to a scheduler, and facts that jobs of all schedulers share."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import Request

UNFINISHED_EXIT_CODE = 3
"""Exit status of a node that was asked to exit before the run was finished. Less than the status of every DlacError."""
FIRST_NODE_VARIABLE = "DLAC_FIRST_NODE"
"""Environment variable with the address of the node that serves the rendezvous."""
KEY_FILE_VARIABLE = "DLAC_RENDEZVOUS_KEY_FILE"
"""Environment variable that names a file with the secret of the rendezvous."""
ANSWER_S = 60.0
"""Seconds until a request to a scheduler counts as unanswered. The client has no limit on a broken network."""
_MARGIN_S = 10
"""Seconds that a node gets in addition to the time its ranks have to leave."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """State of a job as its scheduler reports it."""

    name: str
    over: bool = False
    """No process of the job is left, and the scheduler will start none."""
    first_node_lost: bool = False
    """Slurm: the node of the batch script is lost, so that nothing will ever end the job."""


class Scheduler(Protocol):
    """The client of a scheduler. Each method may raise whatever its commands or its library raise."""

    @property
    def name(self) -> str:
        """Its name in messages."""

    def check(self, spec: JobSpec) -> None:
        """Raise `SpecInvalid` for a setting that it would ignore, cut, or lose with a pod."""

    def check_client(self) -> None:
        """Raise `BadInput` if the package that talks to it is not installed."""

    def render(self, request: Request, near: Sequence[str] = ()) -> str:
        """Return the job as text. Asks no cluster. `near`: preferred nodes."""

    def submit(self, request: Request, near: Sequence[str]) -> str:
        """Submit the job and return its id. It gets nodes of `near` where they are free: they hold the newest checkpoint."""

    def state(self, job: str) -> JobState | None:
        """Return the job's state. None: the scheduler answered, and knows no such job."""

    def read(self, job: str) -> list[tuple[str, str]]:
        """Return the gain of the job's logs since the last call: the name of each log, and a piece of text."""

    def requeue(self, job: str) -> None:
        """Have the job end and start again."""

    def cancel(self, job: str) -> None:
        """Have the job end: its nodes get SIGTERM, and time for a checkpoint."""


def job_name(request: Request) -> str:
    """Return the name of the job. Kubernetes allows 63 characters, with what JobSet appends."""
    return f"dlac-{re.sub('[^a-z0-9]+', '-', request.spec.run.lower())}"[:30].rstrip("-")


def leave_s(request: Request) -> int:
    """Return the whole seconds from SIGTERM until a node is gone."""
    return math.ceil(request.spec.launch.deadline_s) + _MARGIN_S
