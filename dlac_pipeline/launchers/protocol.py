"""Launchers: they run a request to its end, on the target that `launch.on` names.

This node is the core's own launcher. Others enter through the door `dlac.launchers`.
"""

from collections.abc import Callable
from typing import Protocol

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.masking import mask_setting
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.launch_spec import HERE, LAUNCHERS
from dlac_pipeline.supervise.ranks.rank_events import Event
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.supervise.supervisor import Outcome, Supervisor


class Launcher(Protocol):
    """Runner of one request. An entry of `dlac.launchers` makes one: `make(request, on_event)`.

    It starts a supervisor wherever ranks train, and passes the events of the run to `on_event`.
    """

    def check(self) -> None:
        """Raise `SpecInvalid` for a setting that it cannot follow, `BadInput` if a package is missing. Starts nothing."""

    def render(self) -> str:
        """Return the job as a person would submit it. Starts nothing. Raise `SpecInvalid` if there is no such job."""

    def run(self) -> Outcome:
        """Run the request to its end, or until it is stopped. Raise the `DlacError` that ends the run."""

    def stop(self) -> None:
        """Ask for an orderly end of the run. Any thread may call it."""

    def leave(self) -> None:
        """Ask for an orderly end of this node's part of the run. Any thread may call it."""


class Here(Supervisor):
    """The launcher of this node: a supervisor in this process."""

    def check(self) -> None:
        """Do nothing: the supervisor checks script and sources before its first attempt."""

    def render(self) -> str:
        """Raise `SpecInvalid`: there is no job beside this process."""
        others = " or ".join(map(repr, LAUNCHERS.points()))
        raise SpecInvalid(f"expected launch.on = {others} to render a job for, found {HERE!r}")


def launcher_for(request: Request, on_event: Callable[[Event], None], starter: RankStarter | None = None) -> Launcher:
    """Return the launcher that the job spec names in `launch.on`. `starter`, if set, imports for the ranks already.

    Raise `SpecInvalid` if it cannot do what the job spec requests, `BadInput` if it is not installed with all it needs.
    """
    launcher = _make(request, on_event, starter)
    launcher.check()
    return launcher


def render_job(request: Request) -> str:
    """Return the job that a scheduler would get, with *** for each secret. Raise `SpecInvalid` if none can run it."""
    shown = parse_spec(mask_setting("", request.spec.model_dump()), origin="the job spec without its secrets")
    return _make(request.model_copy(update={"spec": shown}), lambda event: None).render()


def _make(request: Request, on_event: Callable[[Event], None], starter: RankStarter | None = None) -> Launcher:
    name = request.spec.launch.on
    if name == HERE:
        return Here(request, on_event=on_event, starter=starter)
    made: Launcher = LAUNCHERS.load(name, setting="launch.on", others=(HERE,))(request, on_event)
    return made
