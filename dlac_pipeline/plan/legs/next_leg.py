"""From a leg and its cursors to the next leg, which differs only if the spec, the tables or failures request it.

The door of new legs: an extension makes a leg that differs. A run whose leg stays needs none.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import ResumeMismatch
from dlac_pipeline.plan.legs.leg import CHANGEABLE, Leg, Unreadable, describe_differences
from dlac_pipeline.plan.order import ReaderState
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec

NEW_LEGS = Door("dlac.new_legs", "maker of new legs")


@dataclass(frozen=True, kw_only=True, slots=True)
class LegRequest:
    """Request for the leg after a checkpoint."""

    requested: Leg
    repin: bool
    """True to continue with the changes of followed tables since they were planned."""
    unreadable: tuple[Unreadable, ...] = ()
    """Row groups to leave out from now on."""


class ChangeLeg(Protocol):
    """The entry `next` of the door. The entry `first` has the arguments and the result of `leaving_out`."""

    def __call__(
        self, plans: Plans, spec: JobSpec, leg: Leg, request: LegRequest, *, step: int, state: ReaderState
    ) -> Leg:
        """Return the next leg. Arguments, result and errors are as of `next_leg`."""


def next_leg(plans: Plans, spec: JobSpec, leg: Leg, request: LegRequest, *, step: int, state: ReaderState) -> Leg:
    """Return the leg after `leg` at `step`, where the cursors are `state`, or `leg` itself if nothing would change.

    Raises:
        ResumeMismatch: the spec requests a change that no leg allows.
        AppendHistoryLost: appended rows cannot be identified any more.
        EmptyPlan: the exclusions leave no row of a source that is read in several passes.
    """
    check_changeable(leg, request.requested)
    if not (request.requested.bound() != leg.bound() or request.unreadable or (request.repin and leg.following)):
        return leg
    change_leg: ChangeLeg = NEW_LEGS.load("next", setting="the next leg")
    return change_leg(plans, spec, leg, request, step=step, state=state)


def check_changeable(leg: Leg, requested: Leg) -> None:
    """Raise `ResumeMismatch`, which names each difference, if `requested` changes what no new leg may change."""
    differing = leg.differences(requested)
    fixed = {name: both for name, both in differing.items() if name.rpartition(": ")[2] not in CHANGEABLE}
    if fixed:
        raise ResumeMismatch(
            f"a new leg may change {', '.join(CHANGEABLE)}; of what leg {leg.index} binds it cannot "
            f"change:\n{describe_differences(fixed)}\n"
            "give the committed values again, or start a run under another name"
        )


def leaving_out(plans: Plans, spec: JobSpec, leg: Leg, unreadable: Sequence[Unreadable]) -> Leg:
    """Return a run's first leg without these row groups, or `leg` itself if it has none of them."""
    if not unreadable:
        return leg
    found: Leg = NEW_LEGS.load("first", setting="the first leg")(plans, spec, leg, unreadable)
    return found
