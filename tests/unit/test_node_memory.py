"""Nodes serve, copy and fetch memory states: whole or not at all, of the present attempt, and with the run's secret only."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.checkpoint.memory import states, transfer
from dlac_pipeline.checkpoint.memory.states import Part, RankState
from dlac_pipeline.checkpoint.memory.transfer import Connection, TransferRefused, key_of
from dlac_pipeline.elastic.rank_assignment import Member, Offer, RoundPlan
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.supervise.memory import buddy
from dlac_pipeline.supervise.memory.buddy import BuddyCopies
from dlac_pipeline.supervise.memory.node_memory import NodeMemory
from dlac_pipeline.supervise.memory.server import MemoryServer, WriteTurn
from tests.conftest import wait_until
from tests.unit.test_memory_choice import STATE

KEY = key_of("a secret of two nodes", "r@ledger")
HERE = "127.0.0.1"


def spec_of(folder: Path) -> JobSpec:
    """Return the job of a node whose memory is a folder."""
    folder.mkdir(exist_ok=True)
    raw = {
        "run": "r",
        "source": {"table": "src.t", "columns": ["x"]},
        "order": {"batch_size": 4, "key_groups": 4, "steps": 1},
        "checkpoint": {"memory": str(folder)},
        "launch": {"script": "x.py", "nodes": "1:9", "rendezvous": f"{HERE}:1", "node_timeout_s": 3},
    }
    return parse_spec(raw, origin="the test").resolved(folder)


def part_of(rank: int, *, world_size: int = 3, step: int = 13, **changes: Any) -> RankState:
    """Return a rank's part of a state with one file of its own."""
    files = [(f"part/{rank}.pt", 1000 + step)]
    return replace(STATE, rank=rank, world_size=world_size, step=step, files=files, **changes)


def keep(folder: Path, part: RankState, *, slot: int = 0) -> None:
    """Write a part into the memory of a node, as a rank does."""
    attempt = states.attempt_folder(folder, part.attempt, part.nonce)
    states.make_folder(attempt)
    place = states.slot_of(attempt, slot)
    for name, size in part.files:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(bytes([part.rank, part.step]) * (size // 2) + bytes(size % 2))
    states.write_seal(place, part.rank, states.pack_seal(part))


@dataclass
class Nodes:
    """Nodes of one rank each, in one round."""

    memories: list[NodeMemory]
    folders: list[Path]
    rounds: list[Round]

    def steps(self) -> list[list[int]]:
        """Return the steps of the whole states in the memory of each node."""
        return [[state.first.step for state in states.read_states(folder)] for folder in self.folders]


@contextmanager
def nodes(home: Path, count: int) -> Iterator[Nodes]:
    """Yield nodes that serve their memories."""
    specs = [spec_of(home / f"node-{place}") for place in range(count)]
    folders = [folder for spec in specs if (folder := states.memory_folder(spec)) is not None]
    with ExitStack() as stack:
        memories = [stack.enter_context(closing(NodeMemory(spec, name="r@ledger"))) for spec in specs]
        offers = [Offer(host="h", address=HERE, ranks=1, memory_port=each.serve(HERE)) for each in memories]
        members = tuple(
            Member(slot=place + 1, id="i", place=place, offer=offer, first_rank=place, ranks=1)
            for place, offer in enumerate(offers)
        )
        plan = RoundPlan.form(members, number=1, port=1)
        rounds = [Round(plan.share(place), plan=plan.part(place) if place else plan) for place in range(count)]
        for memory in memories:
            stack.callback(memory.end)
        yield Nodes(memories, folders, rounds)


def point_of(state: states.MemoryState | None = None) -> ResumePoint:
    """Return the resume point of attempt 3, in a memory state or in none."""
    point = ResumePoint(attempt=3, nonce="c", leg="{}", leg_is_new=False)
    if state is None:
        return point
    first = state.first
    return replace(point, step=first.step, memory_of=2, folder=str(state.folder), world_size=first.world_size)


def wait_for_points(found: Nodes) -> list[ResumePoint]:
    """Wait for the resume points of all nodes."""
    wait_until(lambda: all(memory.local_point() for memory in found.memories), what="resume points")
    return [point for memory in found.memories if (point := memory.local_point()) is not None]


def test_whole_state_is_found_and_fetched(tmp_path: Path) -> None:
    """Three nodes have a rank each, one of them another step: the state that all have is fetched to all."""
    with nodes(tmp_path, 3) as found:
        for rank, folder in enumerate(found.folders):
            keep(folder, part_of(rank), slot=1)
        keep(found.folders[2], part_of(2, step=14), slot=0)
        assert found.steps() == [[], [], []]
        gathered = found.memories[0].find(found.rounds[0])
        (state,) = gathered.read()
        point = point_of(state)
        point = replace(point, memory_sources=gathered.sources_of(point))
        for memory, round_ in zip(found.memories, found.rounds, strict=True):
            memory.begin(ResumePoint.from_json(point.to_json()), round_)
        places = [Path(str(each.folder)) for each in wait_for_points(found)]
        assert [each for each in map(states.read_slot, places) if each] == [
            replace(state, folder=each) for each in places
        ]
        assert (places[0] / "part/2.pt").read_bytes() == (places[2] / "part/2.pt").read_bytes()
        assert [list(memory.take_warnings()) for memory in found.memories] == [[], [], []]


def test_lost_part_leaves_no_state(tmp_path: Path) -> None:
    """A node with a part of the state dies after the claim: the ranks get a folder without a whole state."""
    with nodes(tmp_path, 2) as found:
        for rank, folder in enumerate(found.folders):
            keep(folder, part_of(rank, world_size=2))
        gathered = found.memories[0].find(found.rounds[0])
        point = point_of(gathered.read()[0])
        point = replace(point, memory_sources=gathered.sources_of(point))
        found.memories[1].close()
        found.memories[0].begin(point, found.rounds[0])
        wait_until(lambda: found.memories[0].local_point() is not None, what="the resume point")
        assert states.read_slot(Path(str(point.folder))) is None
        assert "expected ranks [1]" in next(found.memories[0].take_warnings())


def test_nodes_copy_to_their_buddies(tmp_path: Path) -> None:
    """Each node's newest states are copied to the next one. What is copied is marked, so that ranks keep another one."""
    with nodes(tmp_path, 2) as found:
        for memory, round_, folder in zip(found.memories, found.rounds, found.folders, strict=True):
            memory.begin(point_of(), round_)
            states.make_folder(states.attempt_folder(folder, 3, "c"))
        for number in range(3):
            for rank, folder in enumerate(found.folders):
                part = part_of(rank, world_size=2, step=20 + number, attempt=3, nonce="c")
                keep(folder, part, slot=number % 2)
            for folder in found.folders:
                attempt = states.attempt_folder(folder, 3, "c")
                wait_until(lambda: states.copied_step(attempt) == 20 + number, what="a copy")  # noqa: B023 - called here
        assert found.steps() == [[22, 21], [22, 21]] or found.steps() == [[21, 22], [21, 22]]


def test_copy_of_other_attempt_is_refused(tmp_path: Path) -> None:
    """A node takes copies of the attempt that it trains, and once it has ended of none."""
    with nodes(tmp_path, 2) as found, turns(found.folders[1]) as server:
        keep(found.folders[0], part_of(0))
        copies = BuddyCopies(states.attempt_folder(found.folders[0], 2, "b"), [0], server.address, KEY)
        slot = states.slot_of(states.attempt_folder(found.folders[0], 2, "b"), 0)
        states.make_folder(states.attempt_folder(found.folders[1], 2, "b"))
        guards = WriteTurn()
        for attempt, nonce, own, reason in (
            (3, "c", [1], "expected a state of attempt 3"),
            (2, "z", [1], "expected a state of attempt 2, found"),
            (2, "b", [0, 1], "expected ranks of another node, found rank 0"),
        ):
            server.accept(attempt, nonce, own, guards.take())
            with pytest.raises(TransferRefused, match=reason):
                copies._copy(slot, server.address)
        server.accept(2, "b", [1], guards.take())
        guards.take()
        with pytest.raises(TransferRefused, match="another attempt or copy began"):
            copies._copy(slot, server.address)
        assert states.read_parts(found.folders[1]) == []
        server.accept(2, "b", [1], guards.take())
        copies._copy(slot, server.address)
        assert [part.state for part in states.read_parts(found.folders[1])] == [part_of(0)]


def test_new_copy_ends_the_one_before(tmp_path: Path) -> None:
    """A sender that was given up tries again: what arrives of its first copy later is not written."""
    folder = tmp_path / "mine" / "run"
    attempt = states.attempt_folder(folder, 2, "b")
    states.make_folder(attempt)
    slot = states.slot_of(attempt, 0)
    part = part_of(0)
    with turns(folder) as server, ExitStack() as stack:
        server.accept(2, "b", [1], WriteTurn().take())
        first, second = (stack.enter_context(Connection.open(server.address, KEY, timeout_s=10)) for _ in range(2))
        for connection in (first, second):
            connection.send(op="store", slot=states.slot_name(slot), home="elsewhere")
            connection.receive()
            connection.send(seals=[states.pack_seal(part)])
            connection.receive()
        second._socket.sendall(bytes([7]) * part.files[0][1])
        second.send()
        second.receive()
        first._socket.sendall(bytes([9]) * part.files[0][1])
        with pytest.raises(TransferRefused, match="another attempt or copy began"):
            first.receive()
    assert (slot / part.files[0][0]).read_bytes() == bytes([7]) * part.files[0][1]
    assert [found.state for found in states.read_parts(folder)] == [part]


@contextmanager
def turns(folder: Path) -> Iterator[MemoryServer]:
    """Yield a server with the tests' key."""
    with closing(MemoryServer(HERE, folder, KEY)) as server:
        yield server


def test_other_secret_is_refused(tmp_path: Path) -> None:
    """Neither end talks to one with another key, or of another run."""
    with turns(tmp_path) as server:
        for key in (key_of("another secret of nodes", "r@ledger"), key_of("a secret of two nodes", "s@ledger")):
            with pytest.raises(OSError, match=r"closed|reset"):
                Connection.open(server.address, key, timeout_s=10)
        with Connection.open(server.address, KEY, timeout_s=10) as connection:
            connection.send(op="list")
            assert connection.receive()["parts"] == []


def test_stranger_is_not_taken_for_node() -> None:
    """A server that does not know the key cannot answer the challenge."""
    with socket.create_server((HERE, 0)) as stranger:

        def answer() -> None:
            connected, _ = stranger.accept()
            with connected:
                connected.sendall(bytes(32))
                connected.recv(64)
                connected.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransferRefused, match="another key"):
            Connection.open(stranger.getsockname(), KEY, timeout_s=10)
        thread.join()


@pytest.mark.parametrize(
    "files",
    [
        [("../../a.pt", 1)],
        [("/etc/a.pt", 1)],
        [("rank-00000.sealed", 1)],
        [("", 1)],
        [("a.pt", -1)],
        [("a.pt", 1 << 60)],
    ],
    ids=["above", "absolute", "a seal", "empty", "negative", "too large"],
)
def test_bad_files_are_refused(tmp_path: Path, files: list[tuple[str, int]]) -> None:
    """No file is written outside the slot, over a seal, or without room for it."""
    attempt = states.attempt_folder(tmp_path / "mine" / "run", 2, "b")
    states.make_folder(attempt)
    slot = states.slot_of(attempt, 0)
    refusal = offer_parts(slot, [states.pack_seal(replace(part_of(0), files=files))])
    assert "expected" in refusal
    assert not slot.exists()


def offer_parts(slot: Path, seals: Sequence[bytes], *, content: bytes = b"") -> str:
    """Offer parts to a node, as another one does, and return its refusal."""
    with socket.create_server((HERE, 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    problem: list[OSError] = []

    def receive() -> None:
        with Connection(theirs) as connection:
            try:
                transfer.receive_parts(connection, slot, nullcontext, lambda parts: None)
            except OSError as err:
                problem.append(err)

    thread = threading.Thread(target=receive)
    thread.start()
    with Connection(ours) as connection:
        connection.send(seals=seals)
        try:
            connection.receive()
            ours.sendall(content)
        except TransferRefused:
            pass
    thread.join()
    return str(problem[0])


@pytest.fixture(autouse=True)
def shared_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the nodes the secret of the tests' key."""
    monkeypatch.setenv("DLAC_RENDEZVOUS_KEY", "a secret of two nodes")


def test_truncated_copy_is_not_sealed(tmp_path: Path) -> None:
    """The sender dies in the middle of a file: the seal before is gone, and the other slot is untouched."""
    folder = tmp_path / "mine" / "run"
    keep(folder, part_of(0))
    keep(folder, part_of(0, step=14), slot=1)
    slot = states.slot_of(states.attempt_folder(folder, 2, "b"), 0)
    assert "closed the connection" in offer_parts(slot, [states.pack_seal(part_of(0, step=15))], content=b"abc")
    assert [part.state.step for part in states.read_parts(folder)] == [14]


def test_overwritten_state_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that is fenced off may still write: its seal is gone or another one after the files were sent."""
    folder, mine = tmp_path / "theirs" / "run", tmp_path / "mine" / "run"
    keep(folder, part_of(0))
    slot = states.slot_of(states.attempt_folder(folder, 2, "b"), 0)
    target = states.slot_of(states.attempt_folder(mine, 2, "b"), 0)
    states.make_folder(target.parent)
    sent = Connection.send_file

    def send_file(self: Connection, path: Path, size: int) -> None:
        sent(self, path, size)
        states.seal_file(slot, 0).write_bytes(states.pack_seal(part_of(0, step=15)))

    monkeypatch.setattr(Connection, "send_file", send_file)
    with turns(folder) as server, Connection.open(server.address, KEY, timeout_s=10) as connection:
        connection.send(op="fetch", slot=states.slot_name(slot), ranks=[0])
        with pytest.raises(TransferRefused, match="overwritten"):
            transfer.receive_parts(connection, target, nullcontext, lambda parts: None)
    assert states.read_parts(mine) == []


@pytest.mark.parametrize("name", ["../2-b", "000002-b/0-000003-b", "000002-b/x/0-000002-b", ""])
def test_name_of_slot_is_checked(tmp_path: Path, name: str) -> None:
    """No name leads out of the run's folder, and a seal counts only in a slot of its attempt."""
    with pytest.raises(ValueError, match="expected"):
        states.slot_at(tmp_path, name)
    with pytest.raises(ValueError, match="expected"):
        Part(name, states.pack_seal(part_of(0)))


def test_node_without_buddy_keeps_own_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buddy does not answer: after a while the ranks are free to keep states on their own node, and a warning says so."""
    monkeypatch.setattr(buddy, "_RETRY_S", 0.01)
    folder = tmp_path / "mine" / "run"
    keep(folder, part_of(0))
    attempt = states.attempt_folder(folder, 2, "b")
    warnings: list[str] = []
    with socket.create_server((HERE, 0)) as unused:
        nowhere = unused.getsockname()
    BuddyCopies(attempt, [0], nowhere, KEY).run(threading.Event(), patience_s=0.1, warn=warnings.append)
    assert states.copied_step(attempt) == states.ALWAYS
    assert "are kept on this node only" in warnings[0]


def test_shared_memory_is_not_copied(tmp_path: Path) -> None:
    """Two supervisors on one node have one folder: nothing is copied over itself."""
    folder = tmp_path / "mine" / "run"
    keep(folder, part_of(0))
    attempt = states.attempt_folder(folder, 2, "b")
    with turns(folder) as server:
        BuddyCopies(attempt, [0], server.address, KEY)._copy(states.slot_of(attempt, 0), server.address)
    assert [part.state for part in states.read_parts(folder)] == [part_of(0)]


def test_unfinished_copies_are_removed(tmp_path: Path) -> None:
    """An attempt whose ranks here have kept nothing leaves nothing on this node. Its own states stay."""
    with nodes(tmp_path, 2) as found:
        for rank, (memory, round_, folder) in enumerate(zip(found.memories, found.rounds, found.folders, strict=True)):
            memory.begin(point_of(), round_)
            keep(folder, part_of(0, world_size=2, attempt=3, nonce="c"))
            if rank == 0:
                continue
            memory.end()
            assert not folder.exists()
        found.memories[0].end()
        assert len(states.read_parts(found.folders[0])) == 1
        assert os.listdir(found.folders[0]) == ["000003-c"]
