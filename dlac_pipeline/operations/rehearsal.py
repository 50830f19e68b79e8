"""Result of a rehearsal: for each step the loss that production recorded, and the loss of the rehearsal."""

import struct
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsedStep:
    """One step: its record in production, and its result in the rehearsal."""

    step: int
    recorded: float | None
    """Global loss, or None if the ledger has none."""
    replayed: float | None
    """Global loss of the rehearsal, or None if the script ended before the step."""
    recorded_skipped: bool = False
    """True if the engine did not apply the step in production."""
    replayed_skipped: bool = False

    @property
    def compared(self) -> bool:
        """True if a recorded loss exists for comparison."""
        return self.recorded is not None

    @property
    def identical(self) -> bool:
        """True if both losses are equal, bit for bit, and the step was applied in both or in neither."""
        return (_bits(self.recorded), self.recorded_skipped) == (_bits(self.replayed), self.replayed_skipped)

    @property
    def difference(self) -> float | None:
        """Replayed loss minus the recorded one, or None if one of them is missing."""
        return None if self.recorded is None or self.replayed is None else self.replayed - self.recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """Result of a rehearsal."""

    run: str
    checkpoint_id: str
    """The checkpoint that was restored."""
    step: int
    successor: str
    """The committed checkpoint whose losses were compared."""
    attempt: int
    """The production attempt that took those steps."""
    world_size: int
    script: str
    config_changed: bool | None
    """True if spec, script or arguments differ from those that the checkpoint names. None if it names none."""
    steps: tuple[RehearsedStep, ...]
    restore_s: float
    """Seconds to copy the checkpoint into the sandbox and to verify it."""
    replay_s: float

    @property
    def compared(self) -> int:
        """Steps that have a recorded loss."""
        return sum(step.compared for step in self.steps)

    @property
    def differing(self) -> tuple[RehearsedStep, ...]:
        """The compared steps whose losses differ, in order."""
        return tuple(step for step in self.steps if step.compared and not step.identical)

    @property
    def identical(self) -> bool:
        """True if steps were compared, and all of them are identical."""
        return self.compared > 0 and not self.differing

    def to_json(self) -> dict[str, Any]:
        """Return this rehearsal as plain data, with its verdict."""
        differing = [{"step": step.step, "difference": step.difference} for step in self.differing]
        return {**asdict(self), "identical": self.identical, "compared": self.compared, "differing": differing}

    def summary(self) -> str:
        """Return the verdict as one sentence."""
        steps = f"steps {self.step + 1} to {self.steps[-1].step} after checkpoint {self.checkpoint_id!r}"
        if self.identical:
            return f"{steps} on {self.world_size} ranks: {self.compared} losses bit-identical"
        first = self.differing[0]
        found = "no loss: the script ended before" if first.replayed is None else f"{first.replayed!r}"
        by = "" if first.difference is None else f", {first.difference:+.3e} away"
        skipped = " (applied in one of them only)" if first.recorded_skipped != first.replayed_skipped else ""
        changed = "; spec, script or arguments are not those of the checkpoint" if self.config_changed else ""
        return (
            f"{steps} on {self.world_size} ranks: {len(self.differing)} of {self.compared} losses differ, first in step "
            f"{first.step}: expected {first.recorded!r}, found {found}{by}{skipped}{changed}"
        )


def _bits(loss: float | None) -> bytes | None:
    return None if loss is None else struct.pack("<d", loss)
