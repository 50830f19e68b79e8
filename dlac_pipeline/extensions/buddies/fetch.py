"""Memory states of a run on the nodes of a round, as the supervisor of one node serves, copies and fetches them."""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint, Source
from dlac_pipeline.elastic.rank_assignment import Member
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.extensions.buddies.buddy import BuddyCopies
from dlac_pipeline.extensions.buddies.server import FETCH, LIST, TIMEOUT_S, MemoryServer, WriteTurn
from dlac_pipeline.extensions.buddies.transfer import Address, Connection, Guard, key_of, receive_parts
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.node_memory import NodeMemory, forget_unkept, ranks_of
from dlac_pipeline.memory_states.states import FindStates, MemoryState, Part, RankState
from dlac_pipeline.spec.job_spec import JobSpec

_MOST_THREADS = 32
FETCH_SHARE = 0.5
"""Share of `start_timeout_s` that ranks wait for a state in memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStates:
    """Memory states on one node of a round."""

    ranks: range
    """Ranks of the node in the round."""
    parts: Sequence[Part]
    room: int
    """Bytes of free memory."""


@dataclass(kw_only=True, slots=True)
class _Attempt:
    """The attempt whose states this node copies and takes."""

    ranks: range
    """Ranks of this node."""
    folder: Path | None
    guard: Guard
    point: FromMemory | None = None
    """The resume point in memory for the ranks of this node, once its state is on this node."""
    ended: threading.Event = field(default_factory=threading.Event)


class BuddyMemory(NodeMemory):
    """Memory states of a run on this node and, through the servers of further nodes, in a round."""

    def __init__(self, spec: JobSpec, *, name: str) -> None:
        super().__init__(spec, name=name)
        self._key = b""
        self._server: MemoryServer | None = None
        self._warned_of_host = False
        self._turns = WriteTurn()
        self._current: _Attempt | None = None
        self._warnings: deque[str] = deque()

    @property
    def _address(self) -> Address:
        """Address at which this node serves its states."""
        return ("", 0) if self._server is None else self._server.address

    def serve(self, address: str, secret: str) -> int:
        """Serve the memory states at an address of this node. Return the port, or 0 if this node keeps none.

        `secret` is shared by the nodes of the run. They authenticate each other with a key that is derived from it.
        """
        if self.folder is None:
            return 0
        if self._address[0] != address:
            self.close()
            self._key = key_of(secret, self.name)
            with suppress(OSError):
                self._server = MemoryServer(address, self.folder, self._key)
        return self._address[1]

    def find(self, round_: Round) -> FindStates:
        """Ask all nodes of a round for their memory states. Return a function that finds the states.

        A node that does not answer has none. If a node cannot serve its memory, it cannot fetch a state, and none is found.
        """
        share, others = round_.share, [round_.members[place] for place in round_.others]
        is_served = self._server is not None and all(member.offer.memory_port for member in others)
        if self.folder is None or (others and not is_served):
            return list
        with ThreadPoolExecutor(_MOST_THREADS) as pool:
            elsewhere = dict(zip(map(_address_of, others), pool.map(self._list, others), strict=True))
        room = states.room_for_states(self.folder.parents[1])
        here = NodeStates(ranks=ranks_of(share), parts=[], room=room)
        return partial(_find_states, self.folder, {self._address: here, **elsewhere})

    def begin(self, point: ResumePoint, round_: Round) -> None:
        """Fetch the state of a resume point, if it is in memory, and then copy the states of its attempt. Returns at once."""
        self.end()
        folder = self.folder
        self._current = current = _Attempt(
            ranks=ranks_of(round_.share),
            folder=None if folder is None else states.attempt_folder(folder, point.attempt, point.nonce),
            guard=self._turns.take(),
        )

        def work() -> None:
            try:
                if isinstance(point, FromMemory):
                    current.point = self._fetch(point, current, round_.share.world_size)
                if self._server is not None:
                    self._server.accept(point.attempt, point.nonce, current.ranks, current.guard)
                self._copy(current, round_)
            except Exception as err:  # nothing joins this thread
                self._warnings.append(f"expected to copy the states in memory, found {type(err).__name__}: {err}")

        threading.Thread(target=work, name="memory states", daemon=True).start()

    def _copy(self, current: _Attempt, round_: Round) -> None:
        share = round_.share
        if current.folder is None or share.nodes == 1:
            return
        mine = round_.members[share.node]
        buddy = round_.members[mine.buddy]
        if buddy.offer.host == mine.offer.host and not self._warned_of_host:
            self._warned_of_host = True
            self._warnings.append(
                f"expected nodes on several hosts, found all on {mine.offer.host}: their states in memory are lost together"
            )
        address = _address_of(buddy) if buddy.offer.memory_port else None
        copies = BuddyCopies(current.folder, current.ranks, address, self._key)
        copies.run(current.ended, patience_s=2 * self.launch.node_timeout_s, warn=self._warnings.append)

    def local_point(self) -> FromMemory | None:
        """Return the resume point in memory for this node's ranks, once its state is here. They fail if it was lost."""
        return None if self._current is None else self._current.point

    def take_warnings(self) -> Iterator[str]:
        """Yield the warnings since the last call."""
        while self._warnings:
            yield self._warnings.popleft()

    def end(self) -> None:
        """End copies to and from this node. Copies for an attempt whose ranks here have kept no state are removed."""
        current, self._current = self._current, None
        self._turns.take()
        if current is None:
            return
        current.ended.set()
        if current.folder is not None:
            states.remove(states.fetched_folder(current.folder, current.ranks[0]))
            forget_unkept(current.folder, current.ranks)

    def close(self) -> None:
        """Stop serving."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def _list(self, member: Member) -> NodeStates:
        found, room = [], 0
        with (
            suppress(Exception),  # a node of which nothing is known has nothing
            Connection.open(_address_of(member), self._key, LIST, timeout_s=TIMEOUT_S) as other,
        ):
            other.send()
            answer = other.receive()
            room = int(answer["room"])
            for slot, seal in answer["parts"]:
                with suppress(ValueError):  # another version
                    found.append(Part(str(slot), states.parse_seal(seal)))
        return NodeStates(ranks=ranks_of(member), parts=found, room=room)

    def _fetch(self, point: FromMemory, current: _Attempt, world_size: int) -> FromMemory:
        """Return a resume point with a folder of this node, after all parts of its state that its ranks need have been fetched.

        Without them the ranks find no whole state, and fail.
        """
        fetched = None
        try:
            fetched = self._find_or_fetch(point, current, world_size)
        except Exception as err:  # the ranks wait for the resume point
            self._warnings.append(f"expected to fetch the state in memory of step {point.step}, found {err}")
        return replace(point, folder="" if fetched is None else str(fetched))

    def _find_or_fetch(self, point: FromMemory, current: _Attempt, world_size: int) -> Path | None:
        """Return the slot of a state: its attempt's slot if this node has all of it. Otherwise fetch the missing parts."""
        if self.folder is None or current.folder is None or not point.folder:
            return None
        slot = states.slot_at(self.folder, states.slot_name(Path(point.folder)))
        name, until = states.slot_name(slot), time.monotonic() + FETCH_SHARE * self.launch.start_timeout_s
        own = [part for part in states.read_parts(self.folder) if (part.slot, part.state.step) == (name, point.step)]
        if len(own) == point.world_size:
            return slot
        target = states.slot_at(states.fetched_folder(current.folder, current.ranks[0]), name)
        guard = WriteTurn(current.guard).take(until=until)
        with guard():
            states.make_folder(target)
            for part in own:
                _link_part(part, slot, target)
        missing = set(range(point.world_size)) - {part.state.rank for part in own}
        needed = missing & _needed_ranks(point, current.ranks, world_size)
        for host, port, found in point.sources:
            wanted = sorted(missing.intersection(found))
            if wanted and (host, port) != self._address:
                try:
                    with Connection.open((host, port), self._key, FETCH, timeout_s=TIMEOUT_S) as connection:
                        connection.send(slot=name, ranks=wanted, seals_only=sorted(set(wanted) - needed))
                        receive_parts(connection, target, guard, partial(_check_parts, ranks=wanted, step=point.step))
                    missing -= set(wanted)
                except OSError as err:  # another node may have them too
                    self._warnings.append(
                        f"expected ranks {wanted} of the state in memory from {host}:{port}, found {err}"
                    )
        return target


def _find_states(folder: Path, nodes: Mapping[Address, NodeStates]) -> list[MemoryState]:
    """Return the whole states that all nodes have room for, the newest first. Parts of this node, the first one, are read now."""
    here, *others = nodes
    nodes = {**nodes, here: replace(nodes[here], parts=states.read_parts(folder))}
    found = states.find_states(folder, [part for node in nodes.values() for part in node.parts])
    world_size = sum(len(node.ranks) for node in nodes.values())
    return [
        replace(state, sources=_sources_of(state, nodes) if others else [])
        for state in found
        if all(_has_room(node, state, world_size) for node in nodes.values())
    ]


def _sources_of(state: MemoryState, nodes: Mapping[Address, NodeStates]) -> list[Source]:
    found = {address: _ranks_in(node.parts, state) for address, node in nodes.items()}
    return [(*address, sorted(ranks)) for address, ranks in found.items() if ranks]


def _address_of(member: Member) -> Address:
    return member.offer.address, member.offer.memory_port


def _ranks_in(parts: Sequence[Part], state: MemoryState) -> set[int]:
    named = states.slot_name(state.folder), state.first.step
    return {part.state.rank for part in parts if (part.slot, part.state.step) == named}


def _needed_ranks(state: RankState | FromMemory, ranks: range, world_size: int) -> set[int]:
    """Return the ranks of a state whose files the ranks of a node load. Conversions and other engines may read any file."""
    reads_own = state.loads_own_files and state.world_size == world_size
    return {0, *ranks} if reads_own else set(range(state.world_size))


def _has_room(node: NodeStates, state: MemoryState, world_size: int) -> bool:
    """Return whether a node can fetch its part of a state."""
    missing = _needed_ranks(state.first, node.ranks, world_size) - _ranks_in(node.parts, state)
    return not missing or sum(size for rank in missing for _, size in state.ranks[rank].files) <= node.room


def _check_parts(parts: Sequence[RankState], *, ranks: Sequence[int], step: int) -> None:
    if [part.rank for part in parts] != ranks or {part.step for part in parts} != {step}:
        raise ValueError(f"expected ranks {ranks} after step {step}, found others")


def _link_part(part: Part, slot: Path, target: Path) -> None:
    """Make links in another slot to a rank's files and seal. The links see later writes to these files."""
    for path in [*(slot / name for name, _ in part.state.files), states.seal_file(slot, part.state.rank)]:
        link = target / path.relative_to(slot)
        link.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        link.symlink_to(path)
