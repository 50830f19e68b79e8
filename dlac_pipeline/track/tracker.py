"""Reader State Tracker: the consumption of each finished optimizer step, since the last checkpoint.

It advances when an optimizer step is done, never when a batch is returned: prefetched rows are not consumed. Of streamed
sources it keeps the readers' reports, joined per block. Otherwise the order and the steps determine the ledger's rows.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field

from blake3 import blake3

from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.lakehouse.ledger.typed_rows import AdvanceRow, repeatable
from dlac_pipeline.plan.replays import Replays
from dlac_pipeline.plan.slots import ALL_SLOTS, DataCoordinate
from dlac_pipeline.plan.units import Ints
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.line import BlockAdvance, merge


@dataclass(slots=True)
class _Moved:
    """Ranges of one block that consecutive steps moved with one result."""

    first_step: int
    last_step: int
    applied: bool
    advance: BlockAdvance


@dataclass(slots=True)
class ReaderStateTracker:
    """Record of a rank's finished steps. `committed_step` is the step of the last checkpoint that was taken."""

    committed_step: int
    groups: range
    """Key groups whose cursors this rank reports."""
    step: int = 0
    """Last finished step. 0: `committed_step`."""
    coordinate: DataCoordinate = ALL_SLOTS
    """Share of the batches that this rank reads."""
    speaks: bool = True
    """True if this rank reports the moves of its share. Another rank may read the same share."""
    cursors: Ints | None = None
    """Cursors after `step`, int64 [groups, sources, 4], or None where others vote on them."""
    losses: list[float] = field(default_factory=list)
    """Global loss of each step since the last checkpoint, filled as they become known."""
    skipped: list[int] = field(default_factory=list)
    """Steps since then that the engine did not apply."""
    replays: Replays | None = None
    """The replays of the leg. None: skipped steps are not replayed."""
    memberships: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    """Of several process groups: (first step, numbers of those present) of each change since then."""
    earlier: list[AdvanceRow] = field(default_factory=list)
    """Moves since then that other ranks reported before this attempt."""
    _moved: dict[tuple[int, int], list[_Moved]] = field(default_factory=dict)
    """(source, key group) -> its advances since then, in order."""

    def __post_init__(self) -> None:
        self.step = self.step or self.committed_step

    def step_done(self, batch: Batch, *, applied: bool) -> None:
        """Record the finished optimizer step of `batch`. Raises `CursorMismatch` if a step was left out or double."""
        if batch.step != self.step + 1:
            raise CursorMismatch(
                f"expected step_done for step {self.step + 1}, found step {batch.step}: call it once per batch, in order"
            )
        self.step = batch.step
        self.cursors = batch.cursors
        if not applied:
            self.skipped.append(batch.step)
            if self.replays is not None:
                self.replays.skipped.append(batch.step)
        for source, group, advance in batch.moved:
            self._add(self._moved.setdefault((source, group), []), batch.step, applied, advance)

    def step_ranges(self) -> Iterator[tuple[int, int, bool]]:
        """(first step, last step, applied) of each range of steps with one result, since the last checkpoint."""
        start = self.committed_step + 1
        for skipped in [*self.skipped, self.step + 1]:
            if start < skipped:
                yield start, skipped - 1, True
            if skipped <= self.step:
                yield skipped, skipped, False
            start = skipped + 1

    def advances(self) -> Iterator[AdvanceRow]:
        """Moves of streamed sources since the last checkpoint, as this rank reports them: each is reported once per share."""
        yield from self.earlier
        if self.speaks:
            yield from self._own_advances()

    def digest(self) -> str:
        """Return the digest of the moves that this rank has seen. Ranks that read the same share have the same one."""
        return blake3(json.dumps(repeatable(self._own_advances())).encode()).hexdigest()

    def take(self) -> "ReaderStateTracker":
        """Return the record since the last checkpoint was taken, and begin the record for the next one."""
        taken = copy.copy(self)
        self.committed_step = self.step
        self.losses, self.skipped, self.memberships, self.earlier, self._moved = [], [], [], [], {}
        return taken

    def _own_advances(self) -> Iterator[AdvanceRow]:
        for (source, group), moves in self._moved.items():
            for moved in moves:
                yield _advance(source, group, moved)

    def _add(self, moves: list[_Moved], step: int, applied: bool, advance: BlockAdvance) -> None:
        last = moves[-1] if moves else None
        same_block = last is not None and last.advance.cursor[:2] == (advance.pass_index, advance.block)
        if last is None or not same_block or last.applied != applied:
            moves.append(_Moved(step, step, applied, advance))
            return
        last.last_step = step
        (last.advance,) = merge([last.advance, advance])


def _advance(source: int, group: int, moved: _Moved) -> AdvanceRow:
    same = {name: getattr(moved.advance, name) for name in BlockAdvance.__dataclass_fields__}
    positions, reasons = zip(*moved.advance.quarantined, strict=True) if moved.advance.quarantined else ((), ())
    lists = {
        "filtered": tuple(moved.advance.filtered.tolist()),
        "quarantined": positions,
        "quarantine_reasons": reasons,
    }
    return AdvanceRow(
        **{**same, **lists},
        source=source,
        key_group=group,
        first_step=moved.first_step,
        last_step=moved.last_step,
        applied=moved.applied,
    )
