"""Reader of a replica group: its share of the global batch of any step, for any number of groups present.

In: an open leg, a step, and the group's place among the groups present. Out: a batch. The shares of all groups together are the
global batch, whatever the groups read before. Legs whose rows are counted beforehand only.
"""

from collections.abc import Iterator

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import OpenLeg
from dlac_pipeline.read.reader import BatchReader


class ShareReader:
    """Reader of one replica group. It keeps one rank's reader open, and opens another one when the share changes."""

    def __init__(self, opened: OpenLeg) -> None:
        """Raise `SpecInvalid` if the leg's rows are not counted beforehand."""
        if not opened.order.counted:
            raise SpecInvalid(
                "expected sources whose rows are counted beforehand with launch.replicas, found a leg that packs documents or "
                "transforms rows: leave launch.replicas out, or make these rows in a table of their own"
            )
        self._opened = opened
        self._coordinate: DataCoordinate | None = None
        self._reader: BatchReader | None = None
        self._batches: Iterator[Batch] = iter(())
        self._batch: Batch | None = None
        """The last batch, which a step that was not committed needs again."""
        self._step = 0

    def has(self, step: int) -> bool:
        """Return True if the leg has a global batch for `step`."""
        last = self._opened.order.total_steps
        return last is None or step <= last

    def read(self, step: int, coordinate: DataCoordinate) -> Batch:
        """Return the group's share of the global batch of `step`, which the leg has."""
        if coordinate != self._coordinate or step not in (self._step, self._step + 1):
            self._open(step, coordinate)
        if step != self._step or self._batch is None:
            self._batch, self._step = next(self._batches), step
        return self._batch

    def close(self) -> None:
        """End the background threads."""
        if self._reader is not None:
            self._reader.close()

    def _open(self, step: int, coordinate: DataCoordinate) -> None:
        self.close()
        self._reader = self._opened.reader(coordinate=coordinate, step=step - 1, uneven=True)
        self._batches, self._batch = iter(self._reader), None
        self._coordinate, self._step = coordinate, step - 1
