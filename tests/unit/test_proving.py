"""A checkpoint that several machines verify together: one of them reads each file, and the leader what another cannot read."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dlac_pipeline.checkpoint.files import StoreFiles, file_digest
from dlac_pipeline.checkpoint.manifest import FileEntry, Manifest, content_digest
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, StoreUnavailable
from dlac_pipeline.supervise import distributed_verify
from dlac_pipeline.supervise.distributed_verify import NodeVerifier, NodeVerifiers, parts_of
from tests.crews import rounds, silence

MACHINES = 3


class Reads(StoreFiles):
    """Remembers what was read; what is named in `cannot` it cannot read."""

    def __init__(self, cannot: str = "") -> None:
        super().__init__(deadline_s=0.0)
        self.names: list[str] = []
        self._cannot = cannot

    def digest(self, address: str) -> tuple[int, str]:
        """Of a file."""
        self.names.append(address.rsplit("/", 1)[1])
        if self._cannot and self._cannot in address:
            raise StoreUnavailable("not mounted here")
        return super().digest(address)


class Checkpoint:
    """Files of one size in a folder, and their manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "attempt-0001" / "step-000000001-n"
        self.folder.mkdir(parents=True)
        self.names = [f"file-{number:02d}" for number in range(2 * MACHINES)]
        for number, name in enumerate(self.names):
            (self.folder / name).write_bytes(bytes([number]) * 1000)
        paths = [self.folder / name for name in self.names]
        self.bytes = 1000 * len(paths)
        self.manifest = Manifest(
            ledger_uuid="u",
            run="r",
            attempt=1,
            checkpoint_id="c",
            parent=None,
            step=1,
            world_size=MACHINES,
            engine="torch",
            leg=0,
            reader_state=[],
            files=[FileEntry(path=path.name, bytes=1000, digest=file_digest(path)) for path in paths],
            libraries={},
            ledger_rows=[],
        )
        content = self.manifest.to_bytes()
        (self.folder / "manifest.json").write_bytes(content)
        uri = (self.folder / "manifest.json").as_uri()
        self.row = {"manifest_uri": uri, "manifest_digest": content_digest(content)}


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """One that is whole; its leader waits for the others as long as they are there."""
    monkeypatch.setattr(distributed_verify, "_ANSWER_S", 600.0)
    return Checkpoint(tmp_path)


def test_parts_are_balanced_and_complete() -> None:
    """In whatever order the files are given."""
    entries = [FileEntry(path=f"f{size}", bytes=size, digest="") for size in range(40)]
    parts = parts_of(entries, 4)
    assert sorted(entry.path for part in parts for entry in part) == sorted(entry.path for entry in entries)
    sizes = [sum(entry.bytes for entry in part) for part in parts]
    assert max(sizes) - min(sizes) <= 40
    assert parts_of(entries[::-1], 4) == parts
    assert parts_of(entries[:1], 3) == [entries[:1], [], []]


def test_every_file_is_read_by_one_node(checkpoint: Checkpoint) -> None:
    """And the leader hears in the end that all bytes hold."""
    reads = [Reads() for _ in range(MACHINES)]
    heard: list[tuple[int, int]] = []
    with together(reads) as leader:
        leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *each: heard.append(each))
    assert sorted(name for each in reads for name in each.names) == checkpoint.names
    assert all(len(each.names) == len(checkpoint.names) / MACHINES for each in reads)
    assert heard[-1] == (checkpoint.bytes, checkpoint.bytes)


def test_a_small_checkpoint_is_read_by_the_leader(checkpoint: Checkpoint) -> None:
    """Others are not told of it."""
    reads = [Reads() for _ in range(MACHINES)]
    with together(reads, least_bytes=checkpoint.bytes + 1) as leader:
        leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
    assert [len(each.names) for each in reads] == [len(checkpoint.names), 0, 0]


def test_damage_in_any_part_is_named(checkpoint: Checkpoint) -> None:
    """The leader has read it itself before it says so."""
    for name in checkpoint.names:
        path = checkpoint.folder / name
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        reads = [Reads() for _ in range(MACHINES)]
        with together(reads) as leader, pytest.raises(CheckpointDamaged, match=name):
            leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
        assert name in reads[0].names
        path.write_bytes(content)


def test_what_another_machine_cannot_read_the_leader_reads(checkpoint: Checkpoint) -> None:
    """It is no damage."""
    reads = [Reads(), Reads(cannot="file"), Reads()]
    with together(reads) as leader:
        leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
    assert sorted(reads[0].names + reads[2].names) == checkpoint.names


def test_lost_node_is_not_awaited(checkpoint: Checkpoint) -> None:
    """The leader reads its part."""
    reads = [Reads() for _ in range(MACHINES)]
    with together(reads, silent=2) as leader:
        leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
    assert sorted(reads[0].names + reads[1].names) == checkpoint.names


def test_what_is_asked_again_is_read_again(checkpoint: Checkpoint) -> None:
    """The file that was damaged is mended meanwhile: an answer to the first question is none to the second."""
    other = checkpoint.folder / parts_of(checkpoint.manifest.files, 2)[1][0].path
    content = other.read_bytes()
    other.write_bytes(b"")
    reads = [Reads(), Reads()]
    with together(reads) as leader:
        with pytest.raises(CheckpointDamaged, match=other.name):
            leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
        other.write_bytes(content)
        reads[0].names.clear()
        leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
    assert len(reads[0].names) == len(checkpoint.names) / 2


def test_leader_stops_waiting_on_request(checkpoint: Checkpoint) -> None:
    """By what hears of the progress; a machine that is there and says nothing of its part does not hold it up."""
    heard: list[int] = []

    def stop(done: int, total: int) -> None:
        heard.append(done)
        if heard[-5:] == [done] * 5:  # nothing more comes
            raise InterruptedError

    reads = Reads()
    with together([Reads(), Reads()], proves=False) as leader, pytest.raises(InterruptedError):
        leader.verify(checkpoint.row, checkpoint.manifest, reads, stop)
    assert len(reads.names) == len(checkpoint.names) / 2


@contextmanager
def together(
    reads: list[Reads], *, least_bytes: int = 0, silent: int | None = None, proves: bool = True
) -> Iterator[NodeVerifiers]:
    """A leader and those that it leads, which look for what they are told; `silent` says nothing any more."""
    ends = threading.Event()

    def be_led(crew: Round, files: Reads) -> None:
        with closing(NodeVerifier(crew, files)) as prover:
            while not ends.wait(0.05):
                prover.poll()
                crew.publish(prover.message)

    with rounds(len(reads), timeout_s=60 if silent is None else 5) as machines:
        led = [
            threading.Thread(target=be_led, args=(machines[place], reads[place]))
            for place in range(1, len(reads))
            if proves and place != silent
        ]
        if silent is not None:
            silence(machines[silent])
        for thread in led:
            thread.start()
        try:
            yield NodeVerifiers(machines[0], least_bytes=least_bytes)
        finally:
            ends.set()
            for thread in led:
                thread.join()
