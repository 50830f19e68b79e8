"""Policies about rows that attempts fail on: they name the rows that the next attempt leaves out. Extensions bring them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, Protocol

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.plan.legs.leg import Unreadable

if TYPE_CHECKING:
    import tenacity

    from dlac_pipeline.lakehouse.errors import TrainingFailed
    from dlac_pipeline.plan.plan import Plans
    from dlac_pipeline.spec.job_spec import JobSpec
    from dlac_pipeline.supervise.attempt import SupervisedAttempt
    from dlac_pipeline.supervise.failure import Failure
    from dlac_pipeline.supervise.ranks.rank_events import Event

ROW_POLICIES = Door("dlac.row_policies", "row policy")


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartContext:
    """Facts of a launch, and the actions of its supervisor, for policies."""

    spec: JobSpec
    plans: Plans
    publish: Callable[[Event], None]
    retry: tenacity.Retrying
    """Repeats a call while the catalog or the store is unavailable."""
    give_up: Callable[[Failure, int, type[TrainingFailed], str], NoReturn]
    """Records that no attempt follows a failed one with this number, and raises the error with this text."""

    def leave_out(
        self, found: Mapping[tuple[str, int], Collection[int]], *, step: int, reason: str
    ) -> Sequence[Unreadable]:
        """Return rows to leave out, by path and row group, and publish that they were found in a step."""
        rows = [
            Unreadable(path=path, row_group=group, reason=reason, positions=tuple(sorted(positions)))
            for (path, group), positions in sorted(found.items())
        ]
        counts = {"row_groups": len(rows), "rows": sum(len(each.positions) for each in rows)}
        self.publish({"event": "quarantine", "step": step, **counts, "reason": reason, "tentative": True})
        return rows


class RowPolicy(Protocol):
    """A policy of one supervisor, made with its `RestartContext`. Policies are asked in the order of their names.

    The first one that names rows decides. An error of a rank may name the one policy that is asked, in `detail["policy"]`.
    """

    @property
    def undecided(self) -> int:
        """Number of failed attempts in a row after which more such failures would lead to rows. 0: none would."""

    def rows_to_leave_out(self, attempt: SupervisedAttempt, failure: Failure) -> Sequence[Unreadable]:
        """Return the rows that the next attempt leaves out in addition. Empty: others decide. Called once for each failure.

        Raise a `DlacError` if no attempt follows.
        """


def load_policies(context: RestartContext) -> dict[str, RowPolicy]:
    """Return the policies of all installed extensions by name."""
    return {name: make(context) for name, make in ROW_POLICIES.load_all().items()}
