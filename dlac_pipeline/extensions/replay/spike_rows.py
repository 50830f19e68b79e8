"""Rows to blame for a loss spike that ended an attempt, by the samples that the ranks named."""

from collections import defaultdict
from collections.abc import Sequence

from dlac_pipeline.plan.legs.leg import Unreadable
from dlac_pipeline.supervise.attempt import SupervisedAttempt
from dlac_pipeline.supervise.failure import Failure
from dlac_pipeline.supervise.policies.row_policies import RestartContext


class SpikeRows:
    """Policy that leaves out the rows of the samples that a `LossSpiked` names."""

    undecided = 0

    def __init__(self, context: RestartContext) -> None:
        self._context = context

    def rows_to_leave_out(self, attempt: SupervisedAttempt, failure: Failure) -> Sequence[Unreadable]:
        """Return the rows to blame. Empty: the failure is no spike."""
        return self._context.retry(self._find, failure) if "samples" in failure.detail else ()

    def _find(self, failure: Failure) -> Sequence[Unreadable]:
        from dlac_pipeline.extensions.replay.step_rows import (
            StepRows,  # it imports DuckDB, which costs each launch time
        )

        steps = StepRows(self._context.plans.lakehouse, self._context.spec.run, spec=self._context.spec)
        found = defaultdict[tuple[str, int], set[int]](set)
        step = failure.detail["step"]
        rows = steps.of_found(steps.steps.find_trained(step))
        for slot, place, count in failure.detail["samples"]:
            mine = [row for row in rows if row.slot == slot]
            for row in [mine[place]] if len(mine) == count else mine:
                found[row.file_path, row.row_group].add(row.row)
        return self._context.leave_out(found, step=step, reason=failure.message)
