"""Verification of a checkpoint by several nodes: one node reads each file, and the leader what another cannot read."""

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from dlac_pipeline.checkpoint.manifest import FileEntry, content_digest
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, StoreUnavailable
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.lakehouse.store_files import StoreFiles, file_digest
from dlac_pipeline.supervise import distributed_verify
from dlac_pipeline.supervise.distributed_verify import NodeVerifier, NodeVerifiers, parts_of
from tests.launched_nodes import rounds, silence
from tests.small_records import small_manifest

NODES = 3


class Reads(StoreFiles):
    """A store that records its reads, and cannot read the files named in `cannot`."""

    def __init__(self, cannot: str = "") -> None:
        super().__init__(deadline_s=0.0)
        self.names: list[str] = []
        self._cannot = cannot

    def digest(self, address: str) -> tuple[int, str]:
        """Record the file, and return its size and digest."""
        self.names.append(address.rsplit("/", 1)[1])
        if self._cannot and self._cannot in address:
            raise StoreUnavailable("not mounted here")
        return super().digest(address)


class Checkpoint:
    """Files of one size in a folder, and their manifest."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "attempt-0001" / "step-000000001-n"
        self.folder.mkdir(parents=True)
        self.names = [f"file-{number:02d}" for number in range(2 * NODES)]
        for number, name in enumerate(self.names):
            (self.folder / name).write_bytes(bytes([number]) * 1000)
        paths = [self.folder / name for name in self.names]
        self.bytes = 1000 * len(paths)
        files = [FileEntry(path=path.name, bytes=1000, digest=file_digest(path)) for path in paths]
        self.manifest = small_manifest(*files, world_size=NODES)
        content = self.manifest.to_bytes()
        (self.folder / "manifest.json").write_bytes(content)
        uri = (self.folder / "manifest.json").as_uri()
        self.row = CheckpointRow(manifest_uri=uri, manifest_digest=content_digest(content))


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """An undamaged checkpoint. Its leader waits for following nodes while they are members."""
    monkeypatch.setattr(distributed_verify, "ANSWER_S", 600.0)
    return Checkpoint(tmp_path)


def test_parts_are_balanced_and_complete() -> None:
    """The order of the files does not matter."""
    entries = [FileEntry(path=f"f{size}", bytes=size, digest="") for size in range(40)]
    parts = parts_of(entries, 4)
    assert sorted(entry.path for part in parts for entry in part) == sorted(entry.path for entry in entries)
    sizes = [sum(entry.bytes for entry in part) for part in parts]
    assert max(sizes) - min(sizes) <= 40
    assert parts_of(entries[::-1], 4) == parts
    assert parts_of(entries[:1], 3) == [entries[:1], [], []]


def test_every_file_is_read_by_one_node(checkpoint: Checkpoint) -> None:
    """The last progress of the leader counts all bytes."""
    reads = [Reads() for _ in range(NODES)]
    progress: list[tuple[int, int]] = []
    with leader_with_followers(reads) as leader:
        leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *each: progress.append(each))
    assert sorted(name for each in reads for name in each.names) == checkpoint.names
    assert all(len(each.names) == len(checkpoint.names) / NODES for each in reads)
    assert progress[-1] == (checkpoint.bytes, checkpoint.bytes)


def test_damage_in_any_part_is_named(checkpoint: Checkpoint) -> None:
    """The leader reads a damaged file itself before it reports the damage."""
    for name in (part[0].path for part in parts_of(checkpoint.manifest.files, NODES)):
        path = checkpoint.folder / name
        content = path.read_bytes()
        path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        reads = [Reads() for _ in range(NODES)]
        with leader_with_followers(reads) as leader, pytest.raises(CheckpointDamaged, match=name):
            leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
        assert name in reads[0].names
        path.write_bytes(content)


@pytest.mark.parametrize("silent", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_leader_reads_missing_part(checkpoint: Checkpoint, silent: int | None) -> None:
    """The leader reads the part of a lost node, and files that another node cannot read, which are not damaged."""
    reads = [Reads(), Reads(cannot="" if silent else "file"), Reads()]
    with leader_with_followers(reads, silent=silent) as leader:
        leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
    reader = reads[1] if silent else reads[2]
    assert sorted(reads[0].names + reader.names) == checkpoint.names


def test_repeated_request_is_read_again(checkpoint: Checkpoint) -> None:
    """The damaged file is repaired between two requests. An answer to the first request does not answer the second."""
    other = checkpoint.folder / parts_of(checkpoint.manifest.files, 2)[1][0].path
    content = other.read_bytes()
    other.write_bytes(b"")
    reads = [Reads(), Reads()]
    with leader_with_followers(reads) as leader:
        with pytest.raises(CheckpointDamaged, match=other.name):
            leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
        other.write_bytes(content)
        reads[0].names.clear()
        leader.verify(checkpoint.row, checkpoint.manifest, reads[0], lambda *_: None)
    assert len(reads[0].names) == len(checkpoint.names) / 2


def test_leader_stops_waiting_on_request(checkpoint: Checkpoint) -> None:
    """The progress callback may stop the wait for a live node that never answers."""
    progress: list[int] = []

    def stop(done: int, total: int) -> None:
        progress.append(done)
        if progress[-5:] == [done] * 5:  # no more progress
            raise InterruptedError

    reads = Reads()
    with leader_with_followers([Reads(), Reads()], proves=False) as leader, pytest.raises(InterruptedError):
        leader.verify(checkpoint.row, checkpoint.manifest, reads, stop)
    assert len(reads.names) == len(checkpoint.names) / 2


@contextmanager
def leader_with_followers(
    reads: list[Reads], *, silent: int | None = None, proves: bool = True
) -> Iterator[NodeVerifiers]:
    """Yield the verifiers of a leader, with followers that answer its requests. The node `silent` sends no more messages."""
    ends = threading.Event()

    def follow(node: Round, files: Reads) -> None:
        with closing(NodeVerifier(node, files)) as prover:
            while not ends.wait(0.05):
                prover.poll()
                node.publish(prover.message)

    with rounds(len(reads), timeout_s=60 if silent is None else 5) as nodes:
        followers = [
            threading.Thread(target=follow, args=(nodes[place], reads[place]))
            for place in range(1, len(reads))
            if proves and place != silent
        ]
        if silent is not None:
            silence(nodes[silent])
        for thread in followers:
            thread.start()
        try:
            yield NodeVerifiers(nodes[0])
        finally:
            ends.set()
            for thread in followers:
                thread.join()
