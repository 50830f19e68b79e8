"""Committed steps since the head, as every replica group keeps them: any group may be the next committer, which records them."""

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from dlac_pipeline.extensions.replicas.group import Reduced


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    step: int
    loss: float
    applied: bool
    """False if the optimizer skipped the step."""
    groups: tuple[int, ...]


class StepHistory:
    """Losses, results and groups of the committed steps after a checkpoint, in step order."""

    def __init__(self) -> None:
        self._steps: deque[_Step] = deque()

    def add(self, step: int, reduced: Reduced, *, applied: bool = True) -> None:
        """Add the step after the last one."""
        self._steps.append(_Step(step=step, loss=reduced.loss, applied=applied, groups=reduced.groups))

    def forget(self, head_step: int) -> None:
        """Forget steps that a checkpoint has recorded."""
        while self._steps and self._steps[0].step <= head_step:
            self._steps.popleft()

    def losses(self, head_step: int) -> list[float]:
        """Return the losses of the steps after a checkpoint."""
        return [each.loss for each in self._steps if each.step > head_step]

    def skipped(self, head_step: int) -> list[int]:
        """Return the steps after a checkpoint that the optimizer skipped."""
        return [each.step for each in self._steps if each.step > head_step and not each.applied]

    def memberships(self, head_step: int, before: tuple[int, ...]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yield (first step, groups) where the groups changed after a checkpoint, whose last groups were those `before`."""
        for each in self._steps:
            if each.groups != before and each.step > head_step:
                yield each.step, each.groups
                before = each.groups

    def to_records(self) -> list[dict[str, Any]]:
        """Return the steps as plain values, for a peer."""
        return [asdict(each) for each in self._steps]

    def load(self, records: list[dict[str, Any]]) -> None:
        """Replace the steps by a peer's."""
        self._steps = deque(_Step(**{**each, "groups": tuple(each["groups"])}) for each in records)
