"""The folders of a run in its store: checked before an attempt, and shared with other nodes."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.lakehouse.errors import StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.file_io import DurableFileIO
from dlac_pipeline.lakehouse.store_files import StoreFiles

AT_ONCE = 4


def tiers_in(folder: Path, *, apart: bool) -> Tiers:
    """Return the tiers of the run "r" in one folder, or in two."""
    store = (folder / "far").as_uri() if apart else None
    return Tiers(run="r", local=folder / "near", store=store, files=StoreFiles(deadline_s=0.0))


@pytest.mark.parametrize("apart", [False, True], ids=["one place", "two places"])
def test_equal_process_ids_share_store(tmp_path: Path, apart: bool) -> None:
    """Containers on several nodes have the same small process ids. None renames another's file."""
    together = Barrier(AT_ONCE, timeout=120.0)

    def prove(number: int) -> None:
        for _ in range(10):
            together.wait()
            tiers_in(tmp_path, apart=apart).check_writable()

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(prove, range(AT_ONCE)))
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == ({".dlac"} if apart else set())


def test_failed_write_leaves_no_file(tmp_path: Path) -> None:
    """A left-over file would stay, as names are never used again."""
    (tmp_path / "taken" / "by-a-folder").mkdir(parents=True)
    with pytest.raises(OSError, match="taken"):
        write_durably(tmp_path / "taken", b"content")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize("gone", ["near", "far"])
def test_only_run_folder_content_is_made(tmp_path: Path, gone: str) -> None:
    """Nothing is written to a bare mount point whose file system was mounted before."""
    tiers, name = tiers_in(tmp_path, apart=True), "attempt-0001/step-000000010-abcd"
    tiers.check_writable()
    source = tmp_path / "source"
    source.write_bytes(b"state")
    tiers.make(name)
    tiers.put(source, name, "deepspeed/state.pt")
    assert tiers.folder(name).is_dir()
    assert (tmp_path / "far" / "r" / name / "deepspeed" / "state.pt").read_bytes() == b"state"
    (tmp_path / gone).rename(tmp_path / "mounted")
    (tmp_path / gone).mkdir()
    with pytest.raises(StoreUnavailable, match=f"no folder '{tmp_path / gone / 'r'}'.* mount it"):
        tiers.make(name) if gone == "near" else tiers.put(source, name, "state.pt")
    assert list((tmp_path / gone).iterdir()) == []


def test_file_is_closed_after_failed_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that fails at the fsync is reported, and no descriptor leaks."""
    descriptors: list[int] = []

    def failing(descriptor: int) -> None:
        descriptors.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    stream = DurableFileIO().new_output((tmp_path / "file").as_uri()).create()
    stream.write(b"content")
    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError, match="Input/output error"):
        stream.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptors[0])
