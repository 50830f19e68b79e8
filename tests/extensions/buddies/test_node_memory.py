"""Nodes serve, copy and fetch memory states: whole or not at all, of the present attempt, and with the run's secret only."""

import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.checkpoint.restore.resume_point import resume_point_of
from dlac_pipeline.elastic.rank_assignment import Member, Offer, RoundPlan
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.extensions.buddies import buddy, server, transfer
from dlac_pipeline.extensions.buddies.buddy import BuddyCopies
from dlac_pipeline.extensions.buddies.fetch import BuddyMemory
from dlac_pipeline.extensions.buddies.server import MemoryServer, WriteTurn
from dlac_pipeline.extensions.buddies.transfer import Address, Connection, TransferRefused, key_of
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.states import Part
from tests.conftest import wait_until
from tests.memory_states import HERE, OWN, folder_in, fresh_start, keep, part_of, point_of, spec_of

KEY = key_of("a secret of two nodes", "r@ledger")


@dataclass
class Nodes:
    """Nodes of one rank each, in one round."""

    memories: list[BuddyMemory]
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
        memories = [stack.enter_context(closing(BuddyMemory(spec, name="r@ledger"))) for spec in specs]
        ports = [each.serve(HERE, "a secret of two nodes") for each in memories]
        offers = [Offer(host=f"h{port}", address=HERE, ranks=1, memory_port=port) for port in ports]
        members = tuple(
            Member(slot=place + 1, id="i", place=place, offer=offer, first_rank=place, ranks=1)
            for place, offer in enumerate(offers)
        )
        plan = RoundPlan.form(members, number=1, port=1)
        rounds = [Round(plan.share(place), plan=plan.part(place) if place else plan) for place in range(count)]
        for memory in memories:
            stack.callback(memory.end)
        yield Nodes(memories, folders, rounds)


def test_whole_state_is_found_and_fetched(tmp_path: Path) -> None:
    """Three nodes have a rank each, and one node another step: the state that all have is fetched to all."""
    with nodes(tmp_path, 3) as found:
        for rank, folder in enumerate(found.folders):
            keep(folder, part_of(rank), slot=1)
        keep(found.folders[2], part_of(2, step=14), slot=0)
        assert found.steps() == [[], [], []]
        (state,) = found.memories[0].find(found.rounds[0])()
        point = point_of(state)
        for memory, round_ in zip(found.memories, found.rounds, strict=True):
            memory.begin(resume_point_of(json.loads(point.to_json())), round_)
        wait_until(lambda: all(memory.local_point() for memory in found.memories), what="resume points")
        places = [folder_in(memory.local_point()) for memory in found.memories]
        assert [each for each in map(states.read_slot, places) if each] == [
            replace(state, folder=each) for each in places
        ]
        assert (places[0] / "part/2.pt").read_bytes() == (places[2] / "part/2.pt").read_bytes()
        assert places[0].relative_to(found.folders[0]).parts[0] == "000003-c"
        assert [list(memory.take_warnings()) for memory in found.memories] == [[], [], []]


def test_lost_part_leaves_no_state(tmp_path: Path) -> None:
    """A node with a part of the state dies after the claim: the ranks get a folder without a whole state."""
    with nodes(tmp_path, 2) as found:
        for rank, folder in enumerate(found.folders):
            keep(folder, part_of(rank, world_size=2))
        point = point_of(found.memories[0].find(found.rounds[0])()[0])
        found.memories[1].close()
        found.memories[0].begin(point, found.rounds[0])
        wait_until(lambda: found.memories[0].local_point() is not None, what="the resume point")
        assert states.read_slot(folder_in(point)) is None
        assert "expected ranks [1]" in next(found.memories[0].take_warnings())


def test_nodes_copy_to_their_buddies(tmp_path: Path) -> None:
    """Each node's newest states are copied to the next one. Copied states are marked, so that ranks keep another one."""
    with nodes(tmp_path, 2) as found:
        for memory, round_, folder in zip(found.memories, found.rounds, found.folders, strict=True):
            memory.begin(fresh_start(), round_)
            states.make_folder(states.attempt_folder(folder, 3, "c"))
        for number in range(3):
            for rank, folder in enumerate(found.folders):
                keep(folder, part_of(rank, world_size=2, step=20 + number, attempt=3, nonce="c"), slot=number % 2)
            for rank, folder in enumerate(found.folders):
                attempt = states.attempt_folder(folder, 3, "c")
                wait_until(lambda: states.copied_step(attempt, rank) == 20 + number, what="a copy")  # noqa: B023 - called here
        assert found.steps() == [[22, 21], [22, 21]] or found.steps() == [[21, 22], [21, 22]]


def test_copy_of_other_attempt_is_refused(tmp_path: Path) -> None:
    """A node takes copies of the attempt that it trains, and once it has ended of none."""
    with nodes(tmp_path, 2) as found, turns(found.folders[1]) as serving:
        keep(found.folders[0], part_of(0))
        copies = BuddyCopies(states.attempt_folder(found.folders[0], 2, "b"), [0], serving.address, KEY)
        states.make_folder(states.attempt_folder(found.folders[1], 2, "b"))
        guards = WriteTurn()
        for attempt, nonce, own, reason in (
            (3, "c", [1], "expected a state of attempt 3"),
            (2, "z", [1], "expected a state of attempt 2, found"),
            (2, "b", [0, 1], "expected ranks of another node, found rank 0"),
        ):
            serving.accept(attempt, nonce, own, guards.take())
            with pytest.raises(TransferRefused, match=reason):
                copies.copy_new()
        serving.accept(2, "b", [1], guards.take())
        guards.take()
        with pytest.raises(TransferRefused, match="another attempt or copy began"):
            copies.copy_new()
        assert states.read_parts(found.folders[1]) == []
        serving.accept(2, "b", [1], guards.take())
        assert copies.copy_new()
        assert [part.state for part in states.read_parts(found.folders[1])] == [part_of(0)]


@pytest.mark.parametrize("damage", ["", "seal", "truncated", "failed"])
def test_unchanged_blocks_stay(tmp_path: Path, damage: str) -> None:
    """Of a later state in the same slot only changed blocks are sent, unless the buddy lost the earlier one."""
    mine, theirs = tmp_path / OWN / "mine", tmp_path / OWN / "theirs"
    attempt = states.attempt_folder(mine, 2, "b")
    states.make_folder(states.attempt_folder(theirs, 2, "b"))
    block = 1 << 20
    frozen, trained, longer = os.urandom(3 * block + 7), os.urandom(block), os.urandom(block + 1)

    def keep_blocks(step: int, content: bytes) -> Path:
        part = replace(part_of(0, step=step), files=[("frozen.pt", len(frozen)), ("trained.pt", len(content))])
        slot = states.slot_of(attempt, 0)
        states.make_folder(slot)
        (slot / "frozen.pt").write_bytes(frozen)
        (slot / "trained.pt").write_bytes(content)
        states.write_seal(slot, part)
        return slot

    with turns(theirs) as serving:
        serving.accept(2, "b", [1], WriteTurn().take())
        copies = BuddyCopies(attempt, [0], serving.address, KEY)
        keep_blocks(1, trained)
        assert copies.copy_new()
        target = states.slot_of(states.attempt_folder(theirs, 2, "b"), 0)
        slot = keep_blocks(2, longer)
        if damage == "seal":
            states.write_seal(target, part_of(0, step=9))
        elif damage == "truncated":
            os.truncate(target / "frozen.pt", 5)
        elif damage == "failed":
            os.truncate(slot / "trained.pt", 5)
            with pytest.raises(OSError, match="found 5"):
                copies.copy_new()
            keep_blocks(2, longer)
        before = copies.content_bytes
        assert copies.copy_new()
        assert copies.content_bytes - before == len(longer) + (len(frozen) if damage else 0)
        for name, content in (("frozen.pt", frozen), ("trained.pt", longer)):
            assert (target / name).read_bytes() == content
        assert [part.state.step for part in states.parts_in(target)] == [2]


def test_new_copy_ends_the_one_before(tmp_path: Path) -> None:
    """A sender that was given up tries again: what arrives of its first copy later is not written."""
    folder = tmp_path / OWN / "mine"
    attempt = states.attempt_folder(folder, 2, "b")
    states.make_folder(attempt)
    slot = states.slot_of(attempt, 0)
    part = part_of(0)
    with turns(folder) as server, ExitStack() as stack:
        server.accept(2, "b", [1], WriteTurn().take())
        first, second = (stack.enter_context(connect(server.address, "store")) for _ in range(2))
        for connection in (first, second):
            connection.send(slot=states.slot_name(slot), home="elsewhere", first_rank=0)
            connection.receive()
            connection.send(seals=[states.pack_seal(part)])
            connection.receive()
        send(second, bytes([7]) * part.files[0][1], tmp_path / OWN / "sender")
        second.send(checksum=second.checksum())
        second.receive()
        with suppress(BrokenPipeError, ConnectionResetError):  # It may be refused while it is being sent.
            send(first, bytes([9]) * part.files[0][1], tmp_path / OWN / "sender")
        with pytest.raises(TransferRefused, match="another attempt or copy began"):
            first.receive()
    assert (slot / part.files[0][0]).read_bytes() == bytes([7]) * part.files[0][1]
    assert [found.state for found in states.read_parts(folder)] == [part]


def send(connection: Connection, content: bytes, folder: Path) -> None:
    """Send the content of a file."""
    states.make_folder(folder)
    (folder / "sent").write_bytes(content)
    with states.opened(folder) as here:
        connection.send_file(here, "sent", len(content))


def connect(address: Address, operation: str = "list") -> Connection:
    """Connect to a node, as another one of the tests' run."""
    return Connection.open(address, KEY, operation, timeout_s=10)


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
                Connection.open(server.address, key, "list", timeout_s=10)
        with connect(server.address) as connection:
            connection.send()
            assert connection.receive()["parts"] == []


def test_stranger_is_not_taken_for_node() -> None:
    """A server that does not know the key cannot answer the challenge."""
    with socket.create_server((HERE, 0)) as stranger:

        def answer() -> None:
            connected, _ = stranger.accept()
            with connected:
                connected.sendall(bytes(32))
                connected.recv(72)
                connected.sendall(bytes(32))

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(TransferRefused, match="another key"):
            connect(stranger.getsockname())
        thread.join()


@pytest.mark.parametrize(
    "files",
    [
        *([("../../a.pt", 1)], [("/etc/a.pt", 1)], [("rank-00000.sealed", 1)]),
        *([("", 1)], [("a.pt", -1)], [("a.pt", 1 << 60)]),
    ],
    ids=["above", "absolute", "a seal", "empty", "negative", "too large"],
)
def test_bad_files_are_refused(tmp_path: Path, files: list[tuple[str, int]]) -> None:
    """No file is written outside the slot, over a seal, or without room for it."""
    attempt = states.attempt_folder(tmp_path / OWN / "mine", 2, "b")
    states.make_folder(attempt)
    slot = states.slot_of(attempt, 0)
    assert "expected" in offer_parts(slot, [states.pack_seal(replace(part_of(0), files=files))])
    assert not slot.exists()


def offer_parts(slot: Path, seals: Sequence[bytes], *, content: bytes = b"") -> str:
    """Offer parts to a node, as another one does, and return its refusal."""
    with socket.create_server((HERE, 0)) as server:
        ours = socket.create_connection(server.getsockname())
        theirs, _ = server.accept()
    problem: list[OSError] = []

    def receive() -> None:
        with Connection(theirs, "store") as connection:
            try:
                transfer.receive_parts(connection, slot, nullcontext, lambda parts: None)
            except OSError as err:
                problem.append(err)

    thread = threading.Thread(target=receive)
    thread.start()
    with Connection(ours, "store") as connection:
        connection.send(seals=seals)
        try:
            connection.receive()
            ours.sendall(content)
        except TransferRefused:
            pass
    thread.join()
    return str(problem[0])


def test_truncated_copy_is_not_sealed(tmp_path: Path) -> None:
    """The sender dies in the middle of a file: the seal before is gone, and the second slot is untouched."""
    folder = tmp_path / OWN / "mine"
    keep(folder, part_of(0))
    keep(folder, part_of(0, step=14), slot=1)
    slot = states.slot_of(states.attempt_folder(folder, 2, "b"), 0)
    assert "closed the connection" in offer_parts(slot, [states.pack_seal(part_of(0, step=15))], content=b"abc")
    assert [part.state.step for part in states.read_parts(folder)] == [14]


def test_overwritten_state_is_not_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that is fenced off may still write: its seal is gone or another one after the files were sent."""
    folder, mine = tmp_path / OWN / "theirs", tmp_path / OWN / "mine"
    keep(folder, part_of(0))
    slot = states.slot_of(states.attempt_folder(folder, 2, "b"), 0)
    target = states.slot_of(states.attempt_folder(mine, 2, "b"), 0)
    states.make_folder(target.parent)
    sent = Connection.send_file

    def send_file(self: Connection, folder: int, name: str, size: int, known: Sequence[bytes]) -> list[bytes]:
        states.seal_file(slot, 0).write_bytes(states.pack_seal(part_of(0, step=15)))
        return sent(self, folder, name, size, known)

    monkeypatch.setattr(Connection, "send_file", send_file)
    with turns(folder) as server, connect(server.address, "fetch") as connection:
        connection.send(slot=states.slot_name(slot), ranks=[0])
        with pytest.raises(TransferRefused, match="overwritten"):
            transfer.receive_parts(connection, target, nullcontext, lambda parts: None)
    assert states.read_parts(mine) == []


@pytest.mark.parametrize("name", ["../2-b", "000002-b/0-000003-b", "000002-b/x/0-000002-b", ""])
def test_name_of_slot_is_checked(tmp_path: Path, name: str) -> None:
    """No name leads out of the run's folder, and a seal counts only in a slot of its attempt."""
    with pytest.raises(ValueError, match="expected"):
        states.slot_at(tmp_path, name)
    with pytest.raises(ValueError, match="expected"):
        Part(name, part_of(0))


def test_node_without_buddy_keeps_own_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buddy does not answer: after a while the ranks are free to keep states on their own node, until it answers."""
    monkeypatch.setattr(buddy, "RETRY_S", 0.01)
    folder = tmp_path / OWN / "mine"
    keep(folder, part_of(0))
    attempt = states.attempt_folder(folder, 2, "b")
    warnings: list[str] = []
    with socket.create_server((HERE, 0)) as unused:
        nowhere = unused.getsockname()
    monkeypatch.setattr(buddy, "LATER_S", 0.01)
    ended, copies = threading.Event(), BuddyCopies(attempt, [0], nowhere, KEY)
    thread = threading.Thread(target=copies.run, args=(ended,), kwargs={"patience_s": 0.1, "warn": warnings.append})
    thread.start()
    wait_until(lambda: states.copied_step(attempt, 0) == states.ALWAYS, what="ranks that do not wait")

    def answer(copies: BuddyCopies) -> bool:
        states.mark_copied(attempt, 0, 13)
        return True

    monkeypatch.setattr(BuddyCopies, "copy_new", answer)
    wait_until(lambda: states.copied_step(attempt, 0) == 13, what="a copy")
    ended.set()
    thread.join()
    assert len(warnings) == 1
    assert "are kept on this node only" in warnings[0]


@pytest.mark.parametrize("slot", range(states.SLOTS))
def test_older_slot_lowers_no_mark(tmp_path: Path, slot: int) -> None:
    """After an outage both slots are new. The newest state is copied, and the ranks do not wait for it again."""
    mine, theirs = tmp_path / OWN / "mine", tmp_path / OWN / "theirs"
    keep(mine, part_of(0, step=103), slot=slot)
    keep(mine, part_of(0, step=102), slot=1 - slot)
    attempt = states.attempt_folder(mine, 2, "b")
    states.make_folder(states.attempt_folder(theirs, 2, "b"))
    with turns(theirs) as serving:
        serving.accept(2, "b", [1], WriteTurn().take())
        copies = BuddyCopies(attempt, [0], serving.address, KEY)
        for _ in range(states.SLOTS):
            assert copies.copy_new()
            assert states.copied_step(attempt, 0) == 103
    assert not copies.copy_new()
    assert [part.state.step for part in states.read_parts(theirs)] == [103]


def test_ranks_wait_for_late_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The buddy answers again: the ranks overwrite no slot during the copy, and are free again if it fails."""
    monkeypatch.setattr(buddy, "LATER_S", 0.01)
    mine, theirs = tmp_path / OWN / "mine", tmp_path / OWN / "theirs"
    keep(mine, part_of(0))
    attempt = states.attempt_folder(mine, 2, "b")
    states.make_folder(states.attempt_folder(theirs, 2, "b"))
    ended = threading.Event()
    marks: list[int] = []

    def fail(*arguments: Any, **named: Any) -> None:
        marks.append(states.copied_step(attempt, 0))
        if len(marks) == 3:
            ended.set()
        raise OSError("the connection broke")

    monkeypatch.setattr(buddy, "send_parts", fail)
    with turns(theirs) as serving:
        serving.accept(2, "b", [1], WriteTurn().take())
        BuddyCopies(attempt, [0], serving.address, KEY).run(ended, patience_s=0, warn=lambda message: None)
    assert marks == [0, 0, 0]
    assert states.copied_step(attempt, 0) == states.ALWAYS


def test_unfinished_copies_are_removed(tmp_path: Path) -> None:
    """An attempt whose ranks here have kept nothing leaves nothing on this node. Its own states stay."""
    with nodes(tmp_path, 2) as found:
        for rank, (memory, round_, folder) in enumerate(zip(found.memories, found.rounds, found.folders, strict=True)):
            memory.begin(fresh_start(), round_)
            keep(folder, part_of(0, world_size=2, attempt=3, nonce="c"))
            if rank == 0:
                continue
            memory.end()
            assert not folder.exists()
        found.memories[0].end()
        assert len(states.read_parts(found.folders[0])) == 1
        assert os.listdir(found.folders[0]) == ["000003-c"]


def test_fetched_state_is_not_overwritten(tmp_path: Path) -> None:
    """An old launch writes its slot after the fetch: the seal of this node's own part changes, and the state is lost."""
    before = os.umask(0)
    try:
        with nodes(tmp_path, 2) as found:
            for rank in range(2):
                keep(found.folders[1 - rank], part_of(rank, world_size=2))
            state, place = fetch(found)
            assert states.read_slot(place) == replace(state, folder=place)
            assert states.check_unchanged(replace(state, folder=place))
            keep(found.folders[0], part_of(1, world_size=2, step=15))
            assert not states.check_unchanged(replace(state, folder=place))
            assert (place / "part/0.pt").read_bytes() == bytes([0, 13]) * 506 + bytes(1)
            states.remove_state(replace(state, folder=place))
            assert states.read_parts(found.folders[0]) == []
            (found.folders[0] / "converted" / "0-000002-b").mkdir(parents=True)
            states.forget_states(found.folders[0], before=9)
            assert not found.folders[0].exists()
    finally:
        os.umask(before)


def fetch(found: Nodes) -> tuple[states.MemoryState, Path]:
    """Return the newest state of all nodes, and its place on the first one after the fetch."""
    state = found.memories[0].find(found.rounds[0])()[0]
    point = replace(point_of(state), loads_own_files=state.first.loads_own_files)
    found.memories[0].begin(point, found.rounds[0])
    wait_until(lambda: found.memories[0].local_point() is not None, what="the resume point")
    return state, folder_in(found.memories[0].local_point())


def test_only_needed_files_are_fetched(tmp_path: Path) -> None:
    """A rank loads its files and rank 0's, and only the seals of all ranks. With another number of ranks it loads all files."""
    with nodes(tmp_path, 3) as found:
        for rank in range(3):
            keep(found.folders[2 - rank], part_of(rank))
        state, place = fetch(found)
        assert sorted(path.name for path in place.glob("part/*")) == ["0.pt", "2.pt"]
        fetched = states.read_slot(place)
        assert fetched is not None
        assert (fetched.votes(), fetched.trained_since(10)) == (state.votes(), state.trained_since(10))
        found.memories[0].end()
        assert not list(found.folders[0].rglob("1.pt"))
        for folder in found.folders[:2]:
            keep(folder, part_of(0 if folder == found.folders[0] else 1, world_size=2, step=14), slot=1)
        _, place = fetch(found)
        assert sorted(path.name for path in place.glob("part/*")) == ["0.pt", "1.pt"]


@pytest.mark.parametrize("lacks", ["port", "room"])
def test_node_without_memory_takes_no_state(tmp_path: Path, lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is whole, but one node has no memory to fetch it to: the checkpoint is read."""
    with nodes(tmp_path, 2) as found:
        for rank in range(2):
            keep(found.folders[1], part_of(rank, world_size=2))
        assert found.memories[0].find(found.rounds[0])()
        if lacks == "room":
            monkeypatch.setattr(states, "room_for_states", lambda memory: 1012)
        else:
            member = found.rounds[0].members[1]
            offer = replace(member.offer, memory_port=0)
            found.rounds[0].members = {**found.rounds[0].members, 1: replace(member, offer=offer)}
        assert found.memories[0].find(found.rounds[0])() == []


def test_slow_fetch_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks have less time than to start, and read a checkpoint then."""
    monkeypatch.setattr("dlac_pipeline.extensions.buddies.fetch.FETCH_SHARE", 0.0)
    with nodes(tmp_path, 2) as found:
        for rank, folder in enumerate(found.folders):
            keep(folder, part_of(rank, world_size=2))
        _, place = fetch(found)
        assert states.read_slot(place) is None
        assert "it took too long" in next(found.memories[0].take_warnings())


def test_changed_content_is_not_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit changes on the way: the checksum finds it."""
    numbers = iter(range(99))
    monkeypatch.setattr(Connection, "checksum", lambda connection: next(numbers))
    folder = tmp_path / OWN / "mine"
    keep(folder, part_of(0))
    target = tmp_path / OWN / "theirs" / "000002-b" / "0-000002-b"
    states.make_folder(target.parent)
    with turns(folder) as server, connect(server.address, "fetch") as connection:
        connection.send(slot=states.slot_name(target), ranks=[0])
        with pytest.raises(TransferRefused, match="changed on its way"):
            transfer.receive_parts(connection, target, nullcontext, lambda parts: None)
    assert states.read_slot(target) is None


@pytest.mark.parametrize("changed", ["address", "operation"])
def test_relayed_proof_is_refused(changed: str) -> None:
    """A proof counts for one address and one operation only."""
    ours, theirs = socket.socketpair()
    problem: list[OSError] = []

    def accept() -> None:
        try:
            Connection.accept(theirs, (HERE, 2), KEY, timeout_s=10)
        except OSError as err:
            problem.append(err)
            theirs.close()

    thread = threading.Thread(target=accept)
    with ours, theirs:
        thread.start()
        agreed = ours.recv(32) + bytes(32) + b"list    "
        proof = transfer.proof_of(KEY, b"client", (HERE, 1 if changed == "address" else 2), agreed)
        ours.sendall(bytes(32) + (b"store   " if changed == "operation" else b"list    ") + proof)
        thread.join()
    assert "another key" in str(problem[0])


def test_slow_handshake_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stranger sends a byte now and then: the whole handshake has one deadline. More connections than the limit are closed."""
    monkeypatch.setattr(server, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(server, "MOST_CONNECTIONS", 1)
    with turns(tmp_path) as serving, socket.create_connection(serving.address) as slow:
        slow.settimeout(10)
        assert len(slow.recv(32)) == 32
        with socket.create_connection(serving.address) as refused:
            refused.settimeout(10)
            assert refused.recv(32) == b""
        with pytest.raises(OSError, match=r"Broken|reset"):  # noqa: PT012 - several bytes
            while True:
                slow.sendall(b"x")
                wait_until(lambda: True, what="nothing")


def test_ended_run_leaves_no_state(tmp_path: Path) -> None:
    """A loss ends the run: its states on all nodes are removed."""
    with nodes(tmp_path, 2) as found:
        keep(found.folders[0], part_of(0))
        found.memories[0].forget()
        assert not found.folders[0].exists()
