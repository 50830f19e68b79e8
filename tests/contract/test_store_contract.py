"""Promises about a checkpoint store, on a folder and on SeaweedFS's S3 store: whole files, one writer per name, removal."""

import multiprocessing
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from blake3 import blake3

from dlac_pipeline.lakehouse.errors import StoreUnavailable
from dlac_pipeline.lakehouse.store_files import StoreFiles
from tests.seaweedfs import SeaweedFS, needs_seaweedfs

MB = 1 << 20


@pytest.fixture(params=["folder", pytest.param("seaweedfs", marks=needs_seaweedfs)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[StoreFiles, str]:
    """Return a store, and the address of an empty folder in it."""
    if request.param == "folder":
        (tmp_path / "store").mkdir()
        return StoreFiles(), str(tmp_path / "store")
    server: SeaweedFS = request.getfixturevalue("server")
    return StoreFiles(server.properties), f"s3://store/{tmp_path.name}"


def write_random(path: Path, size: int) -> str:
    """Write a file of random bytes. Return its digest."""
    path.write_bytes(os.urandom(size))
    return blake3(path.read_bytes()).hexdigest()


def upload(properties: dict[str, str], source: Path, address: str, begun: Path) -> None:
    """Upload a file in another process."""
    begun.touch()
    StoreFiles(properties).put(source, address, within=address.rpartition("/")[0])


@pytest.mark.parametrize("size", [0, MB, 80 * MB], ids=["empty", "one request", "many parts"])
def test_files_are_kept_whole(store: tuple[StoreFiles, str], tmp_path: Path, size: int) -> None:
    """An uploaded file is read, fetched, digested and listed, and a removed file is gone."""
    files, folder = store
    source, target, address = tmp_path / "source", tmp_path / "target", f"{folder}/a/file"
    digest = write_random(source, size)
    files.put(source, address, within=folder)
    assert files.digest(address) == (size, digest)
    files.fetch(address, target)
    assert target.read_bytes() == source.read_bytes()
    assert (files.children(folder), files.children(f"{folder}/a")) == (["a"], ["file"])
    files.remove(f"{folder}/a")
    assert files.children(f"{folder}/a") == []
    with pytest.raises(FileNotFoundError):
        files.read(address)


def test_similar_names_are_apart(store: tuple[StoreFiles, str]) -> None:
    """The removal of a folder leaves folders whose names begin with its name."""
    files, folder = store
    for name in ("step-1", "step-10"):
        files.write(f"{folder}/{name}/manifest.json", b"{}", within=folder)
    files.remove(f"{folder}/step-1")
    left = {name: files.children(f"{folder}/{name}") for name in ("step", "step-1", "step-10")}
    assert left == {"step": [], "step-1": [], "step-10": ["manifest.json"]}


@needs_seaweedfs
@pytest.mark.parametrize("size", [MB, 80 * MB], ids=["one request", "many parts"])
def test_second_writer_is_refused(server: SeaweedFS, tmp_path: Path, size: int) -> None:
    """A name belongs to its first writer. The same writer may repeat a request whose answer was lost."""
    files, address = StoreFiles(server.properties), f"s3://store/{tmp_path.name}/file"
    first, second = tmp_path / "first", tmp_path / "second"
    digest = write_random(first, size)
    write_random(second, size)
    files.put(first, address, within="s3://store")
    files.put(first, address, within="s3://store")
    began = time.monotonic()
    with pytest.raises(StoreUnavailable, match="another writer"):
        files.put(second, address, within="s3://store")
    with pytest.raises(StoreUnavailable, match="another writer"):
        files.write(address, b"manifest", within="s3://store", new=True)
    assert time.monotonic() - began < 30.0  # a refusal is not tried again
    assert files.digest(address) == (size, digest)


@needs_seaweedfs
def test_one_racing_writer_wins(server: SeaweedFS, tmp_path: Path) -> None:
    """Of eight writers of one new name the store accepts one."""
    address, won = f"s3://store/{tmp_path.name}/manifest.json", []

    def write(number: int) -> None:
        try:
            StoreFiles(server.properties).write(address, b"%d" % number, within="s3://store", new=True)
        except StoreUnavailable:
            return
        won.append(number)

    with ThreadPoolExecutor(8) as writers:
        list(writers.map(write, range(8)))
    assert len(won) == 1
    assert StoreFiles(server.properties).read(address) == b"%d" % won[0]


@pytest.mark.slow
@needs_seaweedfs
@pytest.mark.parametrize("killed", ["client", pytest.param("server", marks=pytest.mark.soak)])
def test_killed_upload_leaves_nothing(server: SeaweedFS, tmp_path: Path, killed: str) -> None:
    """An upload that dies in the middle shows no object. One whose server dies is repeated and whole."""
    source, begun, address = tmp_path / "source", tmp_path / "begun", f"s3://store/{tmp_path.name}/file"
    digest = write_random(source, 200 * MB)
    process = multiprocessing.get_context("spawn").Process(
        target=upload, args=(server.properties, source, address, begun)
    )
    process.start()
    while not begun.exists():
        time.sleep(0.005)
    time.sleep(0.5)
    assert process.is_alive()
    if killed == "client":
        process.kill()
        process.join()
        assert StoreFiles(server.properties).children(f"s3://store/{tmp_path.name}") == []
        upload(server.properties, source, address, begun)
    else:
        server.kill()
        server.start()
        process.join()
        assert process.exitcode == 0
    assert StoreFiles(server.properties).digest(address) == (200 * MB, digest)


@pytest.mark.slow
@needs_seaweedfs
def test_forked_process_reads(server: SeaweedFS, tmp_path: Path) -> None:
    """Obstore's threads do not survive a fork. The child reads through pyarrow, and does not hang."""
    address = f"s3://store/{tmp_path.name}/file"
    StoreFiles(server.properties).write(address, b"content", within="s3://store")
    process = multiprocessing.get_context("fork").Process(target=StoreFiles(server.properties).read, args=(address,))
    process.start()
    process.join(60)
    process.kill()
    assert process.exitcode == 0
