"""Memory states of a run on the nodes of a round, as the supervisor of one node serves, copies and fetches them."""

import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from socket import gethostname

from dlac_pipeline.checkpoint.memory import states
from dlac_pipeline.checkpoint.memory.states import MemoryState, Part
from dlac_pipeline.checkpoint.memory.transfer import Address, Connection, Guard, key_of, receive_parts
from dlac_pipeline.elastic.rank_assignment import Member
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.elastic.sealed_store import shared_secret
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.supervise.memory.buddy import BuddyCopies
from dlac_pipeline.supervise.memory.server import TIMEOUT_S, MemoryServer, WriteTurn

_MOST_THREADS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundStates:
    """Parts of memory states on the nodes of a round. Those of this node are read when they are asked for."""

    folder: Path | None
    """Folder of the run on this node, or None without memory states."""
    elsewhere: Mapping[Address, Sequence[Part]]
    address: Address | None = None
    """Address at which this node serves its states."""

    def read(self) -> list[MemoryState]:
        """Return the whole memory states, the newest first."""
        if self.folder is None:
            return []
        others = [part for parts in self.elsewhere.values() for part in parts]
        return states.find_states(self.folder, [*states.read_parts(self.folder), *others])

    def sources_of(self, point: ResumePoint) -> list[tuple[str, int, list[int]]]:
        """Return the addresses and ports of nodes that have parts of the state of a resume point, with their ranks."""
        if not point.memory_of or not point.folder or self.folder is None or self.address is None:
            return []
        name = states.slot_name(Path(point.folder))
        parts = {self.address: states.read_parts(self.folder), **self.elsewhere}
        found = {address: _ranks_in(each, name, point.step) for address, each in parts.items()}
        return [(*address, sorted(ranks)) for address, ranks in found.items() if ranks]


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """The attempt whose states this node copies and takes."""

    ranks: Sequence[int]
    """Ranks of this node."""
    folder: Path | None
    guard: Guard
    point: ResumePoint | None
    """The resume point for the ranks of this node, once its state is on this node."""
    ended: threading.Event = field(default_factory=threading.Event)


class NodeMemory:
    """Memory states of a run on this node and, through the others' servers, on the nodes of a round."""

    def __init__(self, spec: JobSpec, *, name: str) -> None:
        """`name` is that of the run among all whose nodes share a secret."""
        self._folder = states.memory_folder(spec)
        self._launch = spec.launch
        self._name = name
        self._server: MemoryServer | None = None
        self._turns = WriteTurn()
        self._current: _Attempt | None = None
        self._warnings: SimpleQueue[str] = SimpleQueue()

    def serve(self, address: str) -> int:
        """Serve the memory states at an address of this node. Return the port, or 0 if this node keeps none."""
        if self._folder is None or self._launch.max_nodes == 1:
            return 0
        if self._server is None or self._server.address[0] != address:
            self.close()
            with suppress(OSError):
                self._server = MemoryServer(address, self._folder, self._key())
        return 0 if self._server is None else self._server.address[1]

    def find(self, round_: Round) -> FoundStates:
        """Return the memory states on all nodes of a round. A node that does not answer has none."""
        others = [round_.members[place] for place in round_.others]
        served = [_address_of(member) for member in others if member.offer.memory_port]
        if self._folder is None or self._server is None or not served:
            return FoundStates(folder=self._folder, elsewhere={})
        with ThreadPoolExecutor(min(_MOST_THREADS, len(served))) as pool:
            elsewhere = dict(zip(served, pool.map(self._list, served), strict=True))
        return FoundStates(folder=self._folder, elsewhere=elsewhere, address=self._server.address)

    def begin(self, point: ResumePoint, round_: Round) -> None:
        """Fetch the state of a resume point, if it is in memory, and then copy the states of its attempt. Returns at once."""
        self.end()
        share, folder = round_.share, self._folder
        self._current = current = _Attempt(
            ranks=range(share.first_rank, share.first_rank + share.ranks),
            folder=None if folder is None else states.attempt_folder(folder, point.attempt, point.nonce),
            guard=self._turns.take(),
            point=None if point.memory_of else point,
        )

        def work() -> None:
            current.point = self._fetch(point, current.guard) if point.memory_of else point
            if self._server is not None:
                self._server.accept(point.attempt, point.nonce, current.ranks, current.guard)
            if current.folder is not None and share.nodes > 1:
                buddy = round_.members[(share.node + 1) % share.nodes]
                address = _address_of(buddy) if buddy.offer.memory_port else None
                copies = BuddyCopies(current.folder, current.ranks, address, self._key())
                copies.run(current.ended, patience_s=2 * self._launch.node_timeout_s, warn=self._warnings.put)

        threading.Thread(target=work, name="memory states", daemon=True).start()

    def local_point(self) -> ResumePoint | None:
        """Return the resume point for the ranks of this node, once its state is on this node. They fail if it was lost."""
        return None if self._current is None else self._current.point

    def take_warnings(self) -> Iterator[str]:
        """Yield the warnings since the last call."""
        with suppress(Empty):
            while True:
                yield self._warnings.get_nowait()

    def end(self) -> None:
        """End copies to and from this node. What was copied of an attempt whose ranks here have kept none is removed."""
        current, self._current = self._current, None
        self._turns.take()
        if current is None:
            return
        current.ended.set()
        slots = [] if current.folder is None else [states.slot_of(current.folder, each) for each in range(states.SLOTS)]
        has_own = any(states.seal_file(slot, rank).exists() for slot in slots for rank in current.ranks)
        if current.folder is not None and not has_own:
            shutil.rmtree(current.folder, ignore_errors=True)
            with suppress(OSError):  # it has other attempts, or does not exist
                current.folder.parent.rmdir()

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _key(self) -> bytes:
        return key_of(shared_secret(self._launch), self._name)

    def _list(self, address: Address) -> list[Part]:
        found = []
        with (
            suppress(OSError, KeyError, TypeError),
            Connection.open(address, self._key(), timeout_s=TIMEOUT_S) as other,
        ):
            other.send(op="list")
            for slot, seal in other.receive()["parts"]:
                with suppress(ValueError):  # another version
                    found.append(Part(str(slot), bytes(seal)))
        return found

    def _fetch(self, point: ResumePoint, guard: Guard) -> ResumePoint:
        """Return a resume point with a folder of this node, after all parts of its state have been fetched, or not."""
        if self._folder is None or not point.folder:
            return replace(point, folder="", host=gethostname())
        try:
            slot = states.slot_at(self._folder, states.slot_name(Path(point.folder)))
            name = states.slot_name(slot)
            missing = set(range(point.world_size)) - _ranks_in(states.read_parts(self._folder), name, point.step)
            if missing:
                states.make_folder(slot.parent)
            own = None if self._server is None else self._server.address
            for host, port, ranks in point.memory_sources:
                wanted = sorted(missing.intersection(ranks))
                if wanted and (host, port) != own:
                    try:
                        self._fetch_from((host, port), slot, wanted, point.step, guard)
                        missing -= set(wanted)
                    except OSError as err:
                        self._warnings.put(
                            f"expected ranks {wanted} of the state in memory from {host}:{port}, found {err}"
                        )
        except Exception as err:  # the ranks wait for the resume point
            self._warnings.put(f"expected to fetch the state in memory of step {point.step}, found {err}")
            return replace(point, folder="", host=gethostname())
        return replace(point, folder=str(slot), host=gethostname())

    def _fetch_from(self, address: Address, slot: Path, ranks: list[int], step: int, guard: Guard) -> None:
        def check(parts: Sequence[states.RankState]) -> None:
            if [part.rank for part in parts] != ranks or {part.step for part in parts} != {step}:
                raise ValueError(f"expected ranks {ranks} after step {step}, found others")

        with Connection.open(address, self._key(), timeout_s=TIMEOUT_S) as connection:
            connection.send(op="fetch", slot=states.slot_name(slot), ranks=ranks)
            receive_parts(connection, slot, guard, check)


def _address_of(member: Member) -> Address:
    return member.offer.address, member.offer.memory_port


def _ranks_in(parts: Sequence[Part], slot: str, step: int) -> set[int]:
    return {part.state.rank for part in parts if (part.slot, part.state.step) == (slot, step)}
