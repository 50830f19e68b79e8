"""Replays of a leg: steps after its last one, which read the rows of its skipped steps again.

In: the last step of the leg's order, and the steps that the engine did not apply. Out: the step of the order whose rows each
further step reads. A replayed step has the same global batch, for any number of ranks. See docs/design/0047-skipped-steps.md.
"""

from dataclasses import dataclass, field

_TRIES = 2
"""Replays of a step at most: another one follows if the first is skipped, too."""


@dataclass(kw_only=True, slots=True)
class Replays:
    """The replays of one leg. Further skipped steps only add replays after those that are known."""

    end: int
    """Last step of the leg's order."""
    limit: int | None
    """Last step that the run may have."""
    skipped: list[int] = field(default_factory=list)
    """Steps of the leg that the engine did not apply, in order. Replays are among them."""

    @property
    def total_steps(self) -> int:
        """The last step of the leg, as far as its skipped steps are known."""
        last = self.end + len(self._originals())
        return last if self.limit is None else min(self.limit, last)

    def original(self, step: int) -> int:
        """Return the step of the order whose rows a step reads: itself, if it is no replay."""
        return step if step <= self.end else self._originals()[step - self.end - 1]

    def _originals(self) -> list[int]:
        """Return the originals of the steps after the end, in order."""
        found = [step for step in self.skipped if step <= self.end]
        for step in self.skipped:
            if step > self.end and found.count(original := found[step - self.end - 1]) < _TRIES:
                found.append(original)
        return found
