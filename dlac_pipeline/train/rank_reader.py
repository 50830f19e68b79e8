"""What a rank reads: its share of the batches, the memory of the rank of its node that decodes it, or no values.

Once that has ended, skipped steps are replayed if the job spec says so.
"""

import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from dlac_pipeline.checkpoint.collectives import RankTree, failing_together
from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import CursorMismatch
from dlac_pipeline.plan.order import ReaderState
from dlac_pipeline.plan.replays import Replays
from dlac_pipeline.plan.slots import groups_of_slots
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import OpenLeg
from dlac_pipeline.read.reader import Waits
from dlac_pipeline.read.stage_reader import StageReader
from dlac_pipeline.track.tracker import ReaderStateTracker

SHARES = Door("dlac.shares", "way to share what is read")
"""An entry has the arguments (`SharePlace`, function that opens the reader of the share), and returns this rank's reader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharePlace:
    """Place of a rank among those of a node that read one share. The first of them decodes it."""

    name: str
    """Name of these ranks in their attempt, which no other ones on the node have."""
    ranks: list[int]
    rank: int
    key: bytes
    """Secret of the ranks of the attempt, without a space."""
    groups: range
    """Key groups of the share."""
    waits: Waits
    """Waits of reading for other ranks."""


class Reader(Protocol):
    """Reader of an attempt."""

    groups: range
    """Key groups whose cursors this rank reports."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches."""

    def close(self) -> None:
        """End the background threads."""


def open_reader(opened: OpenLeg, step: int, state: ReaderState, communicator: Communicator, *, nonce: str) -> Reader:
    """Open the reader of this rank after a step. Collective. Raises as `OpenLeg.reader`."""
    read, order, own = opened.spec.read, opened.order, communicator.coordinate
    last = order.total_steps
    step = step if last is None else min(step, last)  # replays come after the last one
    takers = communicator.ranks_with_values(of_all_stages=read.stages == "all")
    takes = communicator.rank in takers
    key = communicator.tree.broadcast(secrets.token_hex().encode()) if read.shares == "node" else b""
    shared = takes and read.shares == "node" and len(takers) > 1
    joins = not shared or communicator.rank == takers[0]
    exchange = communicator.exchange(counted=order.counted, joins=joins)
    if not takes:
        return StageReader(order, readers=own.count, step=step, exchange=exchange)
    open_share = partial(opened.reader, coordinate=own, step=step, state=state, exchange=exchange)
    if not shared:
        return open_share()
    place = SharePlace(
        name=f"{nonce}-{takers[0]}",
        ranks=takers,
        rank=communicator.rank,
        key=key,
        groups=groups_of_slots(own.slots(order.settings.batch_size), order.settings.samples_per_group),
        waits=communicator.waits,
    )
    reader: Reader = SHARES.load("node", setting="read.shares")(place, open_share)
    return reader


def open_replay(opened: OpenLeg, communicator: Communicator, step: int) -> Reader:
    """Open a reader of the batches after a step of a counted leg, for this rank alone."""
    own = communicator.coordinate
    if communicator.rank in communicator.ranks_with_values(of_all_stages=opened.spec.read.stages == "all"):
        return opened.reader(coordinate=own, step=step)
    return StageReader(opened.order, readers=own.count, step=step)


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
        """`open_again` opens a reader after a step. `skipped_before`: steps until the tracker's last checkpoint."""
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
