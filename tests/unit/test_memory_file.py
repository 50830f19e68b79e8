from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dlac_pipeline.checkpoint.memory.memory_file import MemoryFile

_MAPS = Path("/proc/self/maps")


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A file in shared memory."""
    path = Path("/dev/shm") / f"dlac-test-{tmp_path.name}-{id(tmp_path)}"
    yield path
    path.unlink(missing_ok=True)


def _check(file: MemoryFile, path: Path, state: dict[str, torch.Tensor]) -> None:
    assert file.overwrite(state) == path.stat().st_size
    read = torch.load(path, weights_only=True)
    assert read.keys() == state.keys()
    assert all(torch.equal(read[name], each) for name, each in state.items())


def _wait(file: MemoryFile) -> None:
    assert file._mapper is not None
    file._mapper.join()


def test_states_of_any_size_follow_each_other(path: Path) -> None:
    """Content is whole, whether it fits into the mapped pages, is shorter, or goes beyond them."""
    file = MemoryFile(path)
    for megabytes in (12, 12, 3, 12, 30, 30, 0, 5):
        size = megabytes << 18
        _check(file, path, {"weight": torch.arange(size), "bias": torch.rand(7)} if size else {"bias": torch.rand(7)})
    file.close()


def test_pages_are_mapped_once_until_the_end(path: Path) -> None:
    """A second state of the same size uses the same pages. Nothing is mapped after the file is closed."""
    file = MemoryFile(path)
    state = {"weight": torch.rand(3 << 20)}
    _check(file, path, state)
    _wait(file)
    pages = file._pages
    assert len(pages) == path.stat().st_size
    _check(file, path, {"weight": -state["weight"]})
    assert file._pages is pages
    assert str(path) in _MAPS.read_text()
    del pages
    file.close()
    assert str(path) not in _MAPS.read_text()


def test_file_that_was_cut_is_written_again(path: Path) -> None:
    """Pages that the file has lost are not touched, which would end the process."""
    file = MemoryFile(path)
    state = {"weight": torch.rand(3 << 20)}
    _check(file, path, state)
    _wait(file)
    with path.open("r+b") as cut:
        cut.truncate(5000)
    _check(file, path, state)
    file.close()


def test_small_files_are_not_mapped(path: Path) -> None:
    """The state of the random generators needs no mapping."""
    file = MemoryFile(path)
    _check(file, path, {"bias": torch.rand(7)})
    assert file._mapper is None
    file.close()
