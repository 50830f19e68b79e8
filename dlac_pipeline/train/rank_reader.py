"""What a rank reads: its share of the batches, the memory of the rank of its node that decodes it, or no values."""

from dataclasses import dataclass
from functools import partial

from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.plan.order import ReaderState
from dlac_pipeline.plan.slots import groups_of_slots
from dlac_pipeline.read.opening.open_leg import OpenLeg
from dlac_pipeline.read.reader import Waits
from dlac_pipeline.read.stage_reader import StageReader
from dlac_pipeline.train.replaying_reader import Reader

SHARES = Door("dlac.shares", "way to share what is read")
"""An entry has the arguments (`SharePlace`, function that opens the reader of the share), and returns this rank's reader."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SharePlace:
    """Place of a rank among those of a node that read one share. The first of them decodes it."""

    name: str
    """Name of these ranks in their attempt, which no other ones on the node have."""
    ranks: list[int]
    rank: int
    groups: range
    """Key groups of the share."""
    waits: Waits
    """Waits of reading for other ranks."""


def open_reader(opened: OpenLeg, step: int, state: ReaderState, communicator: Communicator, *, nonce: str) -> Reader:
    """Open what this rank reads after a step. Collective. Raises as `OpenLeg.reader`."""
    read, order, own = opened.spec.read, opened.order, communicator.coordinate
    last = order.total_steps
    step = step if last is None else min(step, last)  # replays come after the last one
    takers = communicator.ranks_with_values(of_all_stages=read.stages == "all")
    takes = communicator.rank in takers
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
