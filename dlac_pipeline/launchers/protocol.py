"""Launchers: they run a job to its end, on the target that `launch.on` names.

In: a request. Out: events, and the end of the run. Recovery happens beside the ranks, in the supervisor. The launcher of a
cluster submits a job in which every node runs a supervisor, and follows it.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol

from dlac_pipeline.lakehouse.errors import BadInput, SpecInvalid
from dlac_pipeline.lakehouse.masking import mask_setting
from dlac_pipeline.launchers.cluster_checks import check_cluster
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.supervise.supervisor import Outcome, Supervisor

if TYPE_CHECKING:
    from dlac_pipeline.launchers.cluster_job import ClusterJob


class Launcher(Protocol):
    """Runs one request."""

    def run(self) -> Outcome:
        """Train until the run ends.

        Raises:
            DlacError: what it died of.
        """

    def stop(self) -> None:
        """Ask for an orderly end: checkpoint, then leave. May be called from any thread (`launchers/orchestrator.py`)."""

    def leave(self) -> None:
        """Ask this node alone to leave. The run continues if enough others are left."""


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
    """Return the job that a scheduler would get, with *** for each secret. Nothing is submitted.

    Raises:
        SpecInvalid: no scheduler is named, or it cannot do what the job spec requests.
    """
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
