"""Reader of an attempt that replays skipped steps, once the reader of the leg has ended."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Protocol

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.plan.replays import Replays
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import OpenLeg
from dlac_pipeline.track.tracker import ReaderStateTracker


class Reader(Protocol):
    """Reader of an attempt."""

    groups: range
    """Key groups whose cursors this rank reports."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches."""

    def close(self) -> None:
        """End the background threads."""


class ReplayingReader:
    """The batches of a leg, and those of its skipped steps again. `tracker` has the steps that are done."""

    def __init__(
        self,
        reader: Reader,
        open_again: Callable[[int], Reader],
        opened: OpenLeg,
        tracker: ReaderStateTracker,
        tree: RankTree,
        *,
        skipped_before: Sequence[int],
    ) -> None:
        """`open_again` opens a reader of what follows a step. `skipped_before`: steps until the tracker's last checkpoint."""
        end = opened.order.total_steps
        assert end is not None, "the job spec has a source that ends"
        self.groups = reader.groups
        self._reader, self._open_again, self._tracker, self._tree = reader, open_again, tracker, tree
        skipped = [*skipped_before, *tracker.skipped]
        self._replays = tracker.replays = Replays(end=end, limit=opened.leg.steps, skipped=skipped)

    def __iter__(self) -> Iterator[Batch]:
        yield from self._reader
        self._check_agreement()
        while (step := self._tracker.step + 1) <= self._replays.total_steps:
            yield self._replay(step)
            self._check_agreement()

    def close(self) -> None:
        """End the background threads."""
        self._reader.close()

    def _replay(self, step: int) -> Batch:
        """Return the batch of the step that this one replays. It moves no cursor."""
        cursors = self._tracker.cursors
        assert cursors is not None, "the reader of a counted leg has them"
        with closing(self._open_again(self._replays.original(step) - 1)) as reader:
            return replace(next(iter(reader)), step=step, cursors=cursors)

    def _check_agreement(self) -> None:
        """Raise `CursorMismatch` unless all ranks have skipped the same steps. Else some would wait for others for ever."""
        mine = self._replays.skipped
        first = json.loads(self._tree.broadcast(json.dumps(mine).encode()))
        with failing_together(self._tree, doing="the comparison of skipped steps"):
            if mine != first:
                raise CursorMismatch(
                    f"expected rank {self._tree.rank} to have skipped the steps {first} of this leg, as rank 0, found {mine}: "
                    "call run.step_done(loss, applied=...) with the same value on all ranks"
                )
