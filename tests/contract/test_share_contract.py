"""The door of ways to share what is read: shared memory, and another author's queues. All ranks of a share get its batches."""

import socket
import struct
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from dlac_pipeline.extensions.shared_reading import node_readers
from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import TrainingFailed
from dlac_pipeline.plan.slots import DataCoordinate, groups_of_slots
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.opening.open_leg import OpenLeg
from dlac_pipeline.read.reader import Waits
from dlac_pipeline.read.stage_reader import StageReader
from dlac_pipeline.spec.job_spec import OrderSpec
from dlac_pipeline.train.rank_reader import SHARES, Reader, SharePlace
from tests.installed import install_distribution

ORDER = OrderSpec(batch_size=24, key_groups=6, block_slices=2, seed=11, passes=2)
RANKS = [1, 4, 5]
OWN = DataCoordinate(1, 2)
_QUEUES = """
from collections import defaultdict
from queue import Queue

QUEUES = defaultdict(Queue)

class Queued:
    def __init__(self, place, open_share):
        self.place, self.groups = place, place.groups
        self.reader = open_share() if place.rank == place.ranks[0] else None

    def __iter__(self):
        others = [QUEUES[self.place.name, rank] for rank in self.place.ranks[1:]]
        for batch in self.reader or iter(QUEUES[self.place.name, self.place.rank].get, None):
            for queue in others if self.reader else ():
                queue.put(batch)
            yield batch
        for queue in others if self.reader else ():
            queue.put(None)

    def close(self):
        if self.reader:
            self.reader.close()
"""


def place_of(opened: OpenLeg, ranks: list[int]) -> partial[SharePlace]:
    """Return the place of a rank among those of a share, but for the rank."""
    settings = opened.order.settings
    groups = groups_of_slots(OWN.slots(settings.batch_size), settings.samples_per_group)
    return partial(SharePlace, name=uuid.uuid4().hex, key=b"secret", ranks=ranks, groups=groups, waits=Waits())


Make = Callable[[OpenLeg], list[Reader]]


@pytest.fixture(params=["node", "queues"])
def readers(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """The readers of the ranks of a share, in one process."""
    door = SHARES
    if request.param == "queues":
        (site := tmp_path / "site").mkdir()
        points = {"test.shares": ["queues = queued:Queued"]}
        monkeypatch.syspath_prepend(str(install_distribution(site, "queued", {"queued": _QUEUES}, points)))
        door = Door("test.shares", "way to share what is read")
    share: Callable[[SharePlace, Callable[[], Reader]], Reader] = door.load(request.param, setting="read.shares")

    def make(opened: OpenLeg) -> list[Reader]:
        place = place_of(opened, RANKS)
        return [share(place(rank=rank), partial(opened.reader, coordinate=OWN)) for rank in RANKS]

    return make


def test_ranks_of_a_share_get_its_batches(opened: OpenLeg, readers: Make) -> None:
    """Tensors, slots, counts and cursors are those of a reader of the share."""
    with closing(opened.reader(coordinate=OWN)) as alone:
        expected, groups = [facts_of(batch) for batch in alone], alone.groups
    made = readers(opened)
    with ThreadPoolExecutor(len(RANKS)) as threads:
        found = [*threads.map(lambda reader: [facts_of(batch) for batch in reader], made)]
    for reader in made:
        reader.close()
    assert [reader.groups for reader in made] == [groups] * len(RANKS)
    assert found == [expected] * len(RANKS)


def test_kept_batches_stay_as_they_were(opened: OpenLeg, readers: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script may keep all batches, mapped ones and copies."""
    monkeypatch.setattr(node_readers, "_MOST_LIVE", 2)
    with closing(opened.reader(coordinate=OWN)) as alone:
        expected = [facts_of(batch) for batch in alone]
    made = readers(opened)
    with ThreadPoolExecutor(len(RANKS)) as threads:
        kept: list[list[Batch]] = [*threads.map(list, made)]
    for batches in kept:
        assert [facts_of(batch) for batch in batches] == expected
    for reader in made:
        reader.close()


def test_stranger_is_no_rank(opened: OpenLeg) -> None:
    """A process that finds the address, and has not the key of the run, gets nothing, and no rank waits for it."""
    place = place_of(opened, [0, 1])
    share = SHARES.load("node", setting="read.shares")
    made = [share(place(rank=rank), partial(opened.reader, coordinate=OWN)) for rank in (0, 1)]
    with socket.socket(socket.AF_UNIX) as stranger, ThreadPoolExecutor(2) as threads:
        stranger.connect(f"\0dlac-{place.keywords['name']}")
        stranger.sendall(struct.pack("!i", 7) + b"other 1")
        stranger.settimeout(20)
        first, second = threads.map(lambda reader: [batch.step for batch in reader], made)
        assert stranger.recv(1) == b""
    assert first == second == [*range(1, (opened.order.total_steps or 0) + 1)]
    for reader in made:
        reader.close()


def test_left_loop_goes_on_in_the_next(opened: OpenLeg, readers: Make) -> None:
    """A script that leaves its loop after a step finds the next batch in another loop."""
    made = readers(opened)
    with ThreadPoolExecutor(len(RANKS)) as threads:
        found = [*threads.map(lambda reader: [batch.step for batch in (*islice(reader, 3), *reader)], made)]
    for reader in made:
        reader.close()
    assert found == [[*range(1, (opened.order.total_steps or 0) + 1)]] * len(RANKS)


def facts_of(batch: Any) -> dict[str, Any]:
    """Return what a batch has."""
    tensors = {
        **batch.tensors,
        "valid": batch.valid,
        "source": batch.source,
        "cursors": torch.from_numpy(batch.cursors),
    }
    facts = {name: getattr(batch, name) for name in ("step", "rows", "tokens", "readers", "moved")}
    return facts | {name: (each.dtype, each.tolist()) for name, each in tensors.items()}


def test_rank_that_leaves_is_named(opened: OpenLeg) -> None:
    """A rank whose neighbour has died raises, and does not wait for it."""
    place = place_of(opened, [0, 1])
    share = SHARES.load("node", setting="read.shares")
    first, second = (share(place(rank=rank), partial(opened.reader, coordinate=OWN)) for rank in (0, 1))
    with ThreadPoolExecutor(2) as threads:
        one, two = (iter(each) for each in (first, second))
        for each in [threads.submit(next, batches) for batches in (one, two)]:
            each.result()
        first.close()
        with pytest.raises(TrainingFailed, match=r"expected the ranks \[0, 1\] to read their share together"):
            threads.submit(list, two).result()
    second.close()


def test_stage_reader_counts_as_the_readers_do(opened: OpenLeg) -> None:
    """A stage without values has the same steps and rows, and no cursors."""
    with closing(opened.reader()) as alone:
        expected = [(batch.step, batch.rows, batch.tokens) for batch in alone]
    found = [*StageReader(opened.order, readers=2, step=0)]
    assert [(batch.step, batch.rows, batch.tokens) for batch in found] == expected
    assert {(len(batch.tensors), len(batch.valid), batch.cursors.size) for batch in found} == {(0, 0, 0)}
