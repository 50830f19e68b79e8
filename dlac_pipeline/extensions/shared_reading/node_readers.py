"""Readers of the ranks of a node that have one share: the first one decodes it, and the others map each batch of the first.

A message over a Unix socket describes a batch, and names the block of shared memory that has its tensors.
"""

import hmac
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

from dlac_pipeline.extensions.shared_reading.blocks import (
    MOST_PROCESSES,
    Blocks,
    Layout,
    MappedBlock,
)
from dlac_pipeline.lakehouse.errors import PeerLeft, SpecInvalid
from dlac_pipeline.read.batch import Batch
from dlac_pipeline.read.reader import until_none
from dlac_pipeline.train.rank_reader import Reader, SharePlace

_AHEAD = 2
"""Batches that the first rank may be ahead of another one."""
_MEET_S = 600.0
"""Seconds in which the ranks of a share meet. Before, each has opened the plans."""
_LOOK_S = 0.02
_GREETING_S, _GREETING_BYTES = 10.0, 200
"""Limits of the first message of a rank."""
_MOST_LIVE = 16
"""Batches that a script may keep in shared memory. Further ones are copied: each mapping takes a descriptor."""
_FACTS = ("step", "rows", "tokens", "readers", "cursors", "moved")
"""What a reader says of a batch besides its tensors."""


@dataclass(frozen=True, slots=True)
class _Given:
    """Message about a batch."""

    block: int
    layout: Layout
    columns: list[str]
    facts: dict[str, Any]
    is_new: bool
    """True if the file of a block with this number follows."""


def open_shared(place: SharePlace, open_share: Callable[[], Reader]) -> Reader:
    """Return the reader of a rank: of the share, or of the memory of the first rank.

    Raise `SpecInvalid` if too many ranks of the node read one share.
    """
    others = len(place.ranks) - 1
    if others > MOST_PROCESSES:
        raise SpecInvalid(
            f'expected at most {MOST_PROCESSES + 1} ranks of a node that read one share with read.shares = "node", found '
            f'{others + 1}: set read.shares = "each"'
        )
    if place.rank == place.ranks[0]:
        return GivingReader(place, open_share())
    return MappingReader(place)


def _address(place: SharePlace) -> str:
    """Return the address of the first rank's socket. It is no file, so nothing is left of it."""
    return f"\0dlac-{place.name}"


class GivingReader:
    """The reader of the share. A thread gives each batch to the other ranks, one batch ahead of this one."""

    def __init__(self, place: SharePlace, reader: Reader) -> None:
        self.groups = reader.groups
        self._reader, self._place = reader, place
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(_MEET_S)
        self._socket.bind(_address(place))
        self._socket.listen(len(place.ranks))
        self._connections: list[Connection] = []
        self._blocks = Blocks(others=len(place.ranks) - 1)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlac-give")
        self._batches = enumerate(iter(reader))
        self._upcoming: Future[Batch | None] | None = None

    def __iter__(self) -> Iterator[Batch]:
        return until_none(self._take)

    def _take(self) -> Batch | None:
        if self._upcoming is None:
            with _speaking(self._place):
                self._meet()
            self._upcoming = self._thread.submit(self._give_next)
        batch = self._upcoming.result()
        if batch is not None:
            self._upcoming = self._thread.submit(self._give_next)
        return batch

    def close(self) -> None:
        """End the background threads, and leave the other ranks."""
        _end_waits(self._connections)
        self._thread.shutdown()
        self._reader.close()
        for connection in self._connections:
            connection.close()
        self._socket.close()
        self._blocks.close()

    def _give_next(self) -> Batch | None:
        number, batch = next(self._batches, (0, None))
        with _speaking(self._place):
            if batch is not None:
                self._give(number, batch)
            else:
                for connection in self._connections:
                    connection.send(None)
        return batch

    def _meet(self) -> None:
        found: dict[int, Connection] = {}
        while len(found) < len(self._place.ranks) - 1:
            other = Connection(self._socket.accept()[0].detach())
            rank = self._greeted(other)
            if rank in self._place.ranks[1:] and rank not in found:
                found[rank] = other
            else:
                other.close()
        self._connections = [found[rank] for rank in self._place.ranks[1:]]

    def _greeted(self, other: Connection) -> int | None:
        """Return the rank at the other end. None: it is no rank of this run."""
        with suppress(EOFError, OSError, ValueError):
            if _is_of_this_user(other) and other.poll(_GREETING_S):
                key, _, rank = other.recv_bytes(_GREETING_BYTES).partition(b" ")
                return int(rank) if hmac.compare_digest(key, self._place.key) else None
        return None

    def _give(self, number: int, batch: Batch) -> None:
        for connection in self._connections if number > _AHEAD else ():
            connection.recv_bytes()  # that the other rank has taken a batch
        block, is_new, layout = self._blocks.write([*batch.tensors.values(), batch.valid, batch.source])
        facts = {name: getattr(batch, name) for name in _FACTS}
        for connection in self._connections:
            connection.send(_Given(block.number, layout, [*batch.tensors], facts, is_new))
            if is_new:
                # the process number is used on Windows only
                send_handle(connection, block.file, 0)


class MappingReader:
    """The reader of a rank that decodes nothing. A thread maps each batch ahead, because its message takes a part of a step."""

    def __init__(self, place: SharePlace) -> None:
        self.groups = place.groups
        self._place = place
        self._connection: Connection | None = None
        self._blocks: dict[int, MappedBlock] = {}
        self._index = place.ranks.index(place.rank) - 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="dlac-map")
        self._upcoming: Future[Batch | None] | None = None
        self._is_over = False

    def __iter__(self) -> Iterator[Batch]:
        return until_none(self._take)

    def _take(self) -> Batch | None:
        if self._is_over:
            return None
        upcoming, since = self._upcoming or self._thread.submit(self._next), time.monotonic()
        batch = upcoming.result()
        self._place.waits.seconds += time.monotonic() - since
        self._is_over = batch is None
        if batch is not None:
            self._upcoming = self._thread.submit(self._next)
        return batch

    def _next(self) -> Batch | None:
        with _speaking(self._place):
            given = self._receive()
        if given is None:
            return None
        tensors = self._blocks[given.block].tensors(given.layout)
        if sum(block.live for block in self._blocks.values()) > _MOST_LIVE:
            tensors = [tensor.clone() for tensor in tensors]
        *tensors, valid, source = tensors
        columns = dict(zip(given.columns, tensors, strict=True))
        return Batch(tensors=columns, valid=valid, source=source, **given.facts)

    def _receive(self) -> _Given | None:
        if self._connection is None:
            self._connection = self._connect()
            self._connection.send_bytes(self._place.key + b" %d" % self._place.rank)
        given: _Given | None = self._connection.recv()
        if given is not None and given.is_new:
            self._map(given.block, recv_handle(self._connection))
        if given is not None:
            with suppress(OSError):  # the first rank needs no answer after its last batch
                self._connection.send_bytes(b"taken")
        return given

    def close(self) -> None:
        """Leave the first rank. Batches that the script has stay."""
        self._is_over = True
        _end_waits([] if self._connection is None else [self._connection])
        self._thread.shutdown()
        if self._connection is not None:
            self._connection.close()
        for block in self._blocks.values():
            block.close()

    def _map(self, number: int, file: int) -> None:
        replaced = self._blocks.get(number)
        if replaced is not None:
            replaced.close()
        self._blocks[number] = MappedBlock(file, self._index)

    def _connect(self) -> Connection:
        deadline = time.monotonic() + _MEET_S
        while True:
            try:
                with socket.socket(socket.AF_UNIX) as found:
                    found.connect(_address(self._place))
                    connection = Connection(found.detach())
            except ConnectionRefusedError:  # the first rank still opens the plans
                if time.monotonic() > deadline or self._is_over:
                    raise
                time.sleep(_LOOK_S)
                continue
            if not _is_of_this_user(connection):
                raise ConnectionRefusedError("the process at its address is another user's")
            return connection


def _is_of_this_user(connection: Connection) -> bool:
    """Return whether the process at the other end has this one's user. Everybody on the node can see the address."""
    with socket.socket(fileno=os.dup(connection.fileno())) as other:
        facts = other.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", facts)[1] == os.getuid())


def _end_waits(connections: Sequence[Connection]) -> None:
    """End the waits of a thread for the other ends of connections."""
    for connection in connections:
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as other:
            other.shutdown(socket.SHUT_RDWR)


@contextmanager
def _speaking(place: SharePlace) -> Iterator[None]:
    """Raise `PeerLeft` if another rank of the share has left."""
    try:
        yield
    except (ConnectionError, TimeoutError, EOFError) as err:
        raise PeerLeft(
            f"expected the ranks {place.ranks} to read their share together, found that one has left rank {place.rank}: see "
            "its log for the cause"
        ) from err
