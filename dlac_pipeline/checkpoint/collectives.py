"""Votes up and decisions down a binomial tree of ranks: depth and messages per rank are O(log n).

Messages travel over a CPU (gloo) group of DLAC's own. Trees of several threads share a group, and each one's messages have a tag.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import msgpack
import torch
import torch.distributed as dist

from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.errors import CheckpointError, DlacError

Named = tuple[str, str]
"""Class of an error of ours, and its message."""


class RankTree:
    """The ranks of one attempt. Rank 0 is the root, the coordinator."""

    def __init__(self, rank: int, world_size: int, group: dist.ProcessGroup | None, *, tag: int = 0) -> None:
        self.rank = rank
        self.world_size = world_size
        self._group = group
        self._tag = tag

    @property
    def parent(self) -> int:
        """The rank this one reports to: its number without its lowest set bit."""
        return self.rank & (self.rank - 1)

    @property
    def children(self) -> list[int]:
        """The ranks that report to this one, nearest first."""
        found, bit = [], 1
        while not self.rank & bit and self.rank + bit < self.world_size:
            found.append(self.rank + bit)
            bit <<= 1
        return found

    def gather(self, payload: bytes) -> list[bytes] | None:
        """Return all ranks' payloads in rank order at the root, None elsewhere. Collective."""
        collected = {self.rank: payload}
        for child in self.children:
            collected.update(msgpack.unpackb(self._receive(child), strict_map_key=False))
        if self.rank == 0:
            return [collected[rank] for rank in range(self.world_size)]
        self._send(msgpack.packb(collected), self.parent)
        return None

    def lowest(self, payload: bytes) -> bytes:
        """Return the payload of the lowest rank that has one at the root, else b"". No message is longer. Collective."""
        found = [payload, *map(self._receive, self.children)]  # the ranks below a child come before the next child
        lowest = next(filter(None, found), b"")
        if self.rank == 0:
            return lowest
        self._send(lowest, self.parent)
        return b""

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return the root's payload, at every rank. Collective."""
        if self.rank != 0:
            payload = self._receive(self.parent)
        assert payload is not None, "the root decides"
        for child in reversed(self.children):
            self._send(payload, child)
        return payload

    def _send(self, payload: bytes, to: int) -> None:
        dist.send(torch.tensor([len(payload)]), to, group=self._group, tag=self._tag)
        if payload:
            dist.send(torch.frombuffer(bytearray(payload), dtype=torch.uint8), to, group=self._group, tag=self._tag)

    def _receive(self, source: int) -> bytes:
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source, group=self._group, tag=self._tag)
        payload = torch.empty(int(size), dtype=torch.uint8)
        if len(payload):
            dist.recv(payload, source, group=self._group, tag=self._tag)
        return payload.numpy().tobytes()


def name_failure(err: Exception, *, doing: str) -> Named:
    """Return a failure as a message. `doing` names the work that a foreign error ended."""
    if isinstance(err, DlacError):
        return errors.error_kind(err), str(err)
    return CheckpointError.__name__, f"{doing} failed with {type(err).__name__}: {err}"


def failure_named(named: Named) -> DlacError:
    """Return the failure of a message."""
    return errors.error_from_kind(*named, default=CheckpointError)


@contextmanager
def failing_together(tree: RankTree, *, doing: str) -> Iterator[None]:
    """Raise the failure of the lowest rank that failed at all ranks, once all are done. Collective."""
    failure = b""
    try:
        yield
    except Exception as err:
        failure = msgpack.packb(name_failure(err, doing=doing))
    if first := tree.broadcast(tree.lowest(failure)):
        raise failure_named(msgpack.unpackb(first))
