"""Launchers: they run a job to its end, on the target that `launch.on` names. And their interface to the scheduler of a cluster.

In: a request. Out: events, and the end of the run. Recovery happens beside the ranks, in the supervisor. The launcher of a
cluster submits a job in which every node runs a supervisor, and follows it.
"""

import math
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, TypeAlias

from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid
from dlac_pipeline.lakehouse.masking import mask_setting
from dlac_pipeline.launchers.cluster_checks import check_cluster
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from dlac_pipeline.launchers.cluster_job import ClusterJob

UNFINISHED_EXIT_CODE = 3
"""Exit status of a node that was asked to exit before the run was finished. Less than the status of every DlacError."""
FIRST_NODE_VARIABLE = "DLAC_FIRST_NODE"
"""Environment variable with the address of the node that serves the rendezvous."""
KEY_FILE_VARIABLE = "DLAC_RENDEZVOUS_KEY_FILE"
"""Environment variable that names a file with the secret of the rendezvous."""
ANSWER_S = 60.0
"""Seconds until a request to a scheduler counts as unanswered. The client has no limit of its own on a broken network."""
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

    def render(self, request: Request, near: Sequence[str] = ()) -> str:
        """Return the job as text. Asks no cluster. `near`: preferred nodes."""

    def submit(self, request: Request, near: Sequence[str]) -> str:
        """Submit the job and return its id. It gets nodes of `near` where they are free: they hold the newest checkpoint."""

    def state(self, job: str) -> JobState | None:
        """Return the job's state. None: the scheduler answered, and knows no such job."""

    def read(self, job: str) -> list[tuple[str, str]]:
        """Return what the job's logs have gained since the last call: the name of each log, and a piece of text."""

    def requeue(self, job: str) -> None:
        """Have the job end and start again."""

    def cancel(self, job: str) -> None:
        """Have the job end: its nodes get SIGTERM, and time for a checkpoint."""


def job_name(request: Request) -> str:
    """Return the name of the job. Kubernetes allows 63 characters, with what JobSet appends."""
    return f"dlac-{re.sub('[^a-z0-9]+', '-', request.spec.run.lower())}"[:30].rstrip("-")


def leave_s(request: Request) -> int:
    """Return the whole seconds from SIGTERM until a node is gone."""
    return math.ceil(request.spec.launch.leave_s) + _MARGIN_S


def new_key() -> str:
    """Return the secret that the nodes of one job share: they meet without the user's."""
    return secrets.token_hex(32)


Launcher: TypeAlias = "Supervisor | ClusterJob"
"""Runs one request, by `run`. From any thread, `stop` asks for an orderly end of the run, and `leave` of this node's part."""


def launcher_for(request: Request, on_event: Callable[[Event], None], starter: RankStarter | None = None) -> Launcher:
    """Return the launcher that the job spec names in `launch.on`. `starter`, if set, imports for the ranks already.

    Raises:
        SpecInvalid: the scheduler cannot do what the job spec requests.
        BadInput: the client of Kubernetes is not installed.
    """
    if request.spec.launch.on == "here":
        return Supervisor(request, on_event=on_event, starter=starter)
    if request.spec.launch.on == "kubernetes" and find_spec("kubernetes") is None:
        raise BadInput('expected the client of Kubernetes, found none: pip install "dlac-pipeline[cluster]"')
    return _cluster_job(request, on_event)


def render_job(request: Request) -> str:
    """Return the job that a scheduler would get, with *** for each secret. Raise `SpecInvalid` if none can run it."""
    if request.spec.launch.on == "here":
        raise SpecInvalid("expected launch.on = 'slurm' or 'kubernetes' to render a job for, found 'here'")
    shown = parse_spec(mask_setting("", request.spec.model_dump()), origin="the job spec without its secrets")
    return _cluster_job(request.model_copy(update={"spec": shown}), lambda event: None).render()


def _cluster_job(request: Request, on_event: Callable[[Event], None]) -> "ClusterJob":
    from dlac_pipeline.launchers.cluster_job import ClusterJob
    from dlac_pipeline.launchers.kubernetes import Kubernetes
    from dlac_pipeline.launchers.slurm import Slurm

    check_cluster(request.spec)
    return ClusterJob(request, Slurm() if request.spec.launch.on == "slurm" else Kubernetes(request), on_event)
