"""A conversion is made once and whole, is verified before it is used, and goes with its checkpoint."""

import fcntl
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dlac_pipeline.checkpoint.restore import conversion
from dlac_pipeline.checkpoint.restore.conversion import convert_checkpoint
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.lakehouse.errors import StoreUnavailable
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.conftest import Arena, wait_until

KILLED = """
import os, signal, sys
from pathlib import Path
from dlac_pipeline.checkpoint.restore.conversion import convert_checkpoint
def convert(source, target):
    (target / "part").write_bytes(b"late")
    os.kill(os.getpid(), signal.SIGKILL)
convert_checkpoint(Path(sys.argv[1]), convert)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint's folder."""
    made = tmp_path / "run" / "attempt-0001" / "step-000000010-abcd"
    made.mkdir(parents=True)
    (made / "state").write_bytes(b"all")
    return made


def copying(calls: list[Path]) -> Callable[[Path, Path], None]:
    """A conversion that copies, and notes that it was asked to."""

    def convert(source: Path, target: Path) -> None:
        calls.append(target)
        shutil.copytree(source, target / "deep")

    return convert


def kept(folder: Path) -> list[str]:
    """Return the names in the folder of conversions."""
    return sorted(path.name for path in (folder.parent.parent / "converted").iterdir() if path.is_dir())


def test_it_is_made_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The second call uses the existing conversion, without a wait for the lock, even if a frozen process holds it."""
    calls: list[Path] = []
    made = convert_checkpoint(folder, copying(calls))
    assert made == folder.parent.parent / "converted" / folder.name
    with (made.parent / ".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert convert_checkpoint(folder, copying(calls), patience_s=5.0) == made
    assert (len(calls), caplog.text) == (1, "")
    assert (made / "deep" / "state").read_bytes() == b"all"


@pytest.mark.parametrize("damage", ["altered", "unrecorded"])
def test_a_damaged_one_is_made_again(folder: Path, damage: str) -> None:
    """Altered, or without its record: it is never used."""
    calls: list[Path] = []
    path = convert_checkpoint(folder, copying(calls)) / "deep" / "state"
    if damage == "unrecorded":
        (path.parents[1] / "conversion.json").unlink()
    else:
        path.write_bytes(b"ALL")
    assert convert_checkpoint(folder, copying(calls)) == path.parents[1]
    assert path.read_bytes() == b"all"
    assert len(calls) == 2


@pytest.mark.soak
def test_killed_in_the_middle_it_is_made_again(folder: Path) -> None:
    """What a killed process left is not taken for a conversion, and is removed by the next."""
    assert subprocess.run([sys.executable, "-c", KILLED, str(folder)], check=False).returncode == -signal.SIGKILL
    (left,) = kept(folder)
    assert left.startswith(".")
    assert (convert_checkpoint(folder, copying([])) / "deep" / "state").read_bytes() == b"all"
    assert kept(folder) == [folder.name]


def test_working_converter_is_awaited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two calls one converts. The other waits while it writes, however long it takes, and uses the same conversion."""
    calls: list[Path] = []
    looks = threading.Semaphore(0)
    real = conversion.file_sizes

    def sizes(parent: Path) -> dict[str, int]:
        with (parent / "written").open("a") as stream:
            stream.write("more")
        looks.release()
        return real(parent)

    def slow(source: Path, target: Path) -> None:
        for _ in range(6):
            assert looks.acquire(timeout=60)
        copying(calls)(source, target)

    with ThreadPoolExecutor(1) as pool:
        making = pool.submit(convert_checkpoint, folder, slow)
        wait_until(lambda: (folder.parent.parent / "converted").exists() and kept(folder) != [], what="a conversion")
        monkeypatch.setattr(conversion, "file_sizes", sizes)
        assert convert_checkpoint(folder, copying(calls), patience_s=0.05) == making.result()
    assert (len(calls), kept(folder)) == (1, [folder.name])


def test_a_failure_leaves_nothing(folder: Path) -> None:
    """A conversion that cannot be written is reported, and leaves no part."""

    def full(source: Path, target: Path) -> None:
        (target / "part").write_bytes(b"half")
        raise OSError("no space left")

    with pytest.raises(StoreUnavailable, match="no space left"):
        convert_checkpoint(folder, full)
    assert kept(folder) == []


@pytest.mark.slow
def test_it_goes_with_its_checkpoint(arena: Arena) -> None:
    """Retiring a checkpoint removes its conversions. Conversions of kept checkpoints stay."""
    arena.table()
    arena.train(arena.spec("r", world_size=1, passes=1), until=35)
    folders = {row.step: folder_of(row.manifest_uri) for row in arena.rows("r", CheckpointRow)}
    for each in folders.values():
        convert_checkpoint(each, copying([]))
    (folders[10].parent.parent / "converted" / f".{folders[10].name}-dead").mkdir()
    arena.train(arena.spec("r", world_size=1, passes=1, keep_last=1, keep_every_steps=30))
    wait_until(lambda: not folders[10].exists(), what="the removal of the retired")
    wait_until(lambda: kept(folders[30]) == [folders[30].name], what="the removal of conversions")
