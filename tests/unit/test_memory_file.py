import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dlac_pipeline.memory_states.memory_file import MemoryFile

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


def _mapping(path: Path) -> str:
    """Return the addresses at which the file is mapped, or an empty string."""
    return next((line.partition(" ")[0] for line in _MAPS.read_text().splitlines() if line.endswith(str(path))), "")


def test_states_of_any_size_follow_each_other(path: Path) -> None:
    """Content is whole, whether it fits into the mapped pages, is shorter, or goes beyond them."""
    file = MemoryFile(path, is_mapped=True)
    for size in (3_000_000, 3_000_000, 700_000, 3_000_000, 8_000_000, 8_000_000, 0, 1_000_000):
        _check(file, path, {"weight": torch.arange(size), "bias": torch.rand(7)} if size else {"bias": torch.rand(7)})
    file.close()


def test_file_that_was_cut_is_written_again(path: Path) -> None:
    """Pages that the file has lost are not touched, which would end the process."""
    file = MemoryFile(path, is_mapped=True)
    state = {"weight": torch.rand(3 << 20)}
    _check(file, path, state)
    file.wait_for_pages()
    assert _mapping(path)
    with path.open("r+b") as cut:
        cut.truncate(5000)
    _check(file, path, state)
    file.close()


def test_full_memory_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes beyond the mapped pages is written by the system, whose error the caller gets. The file can be written again."""
    file = MemoryFile(path, is_mapped=True)
    state = {"weight": torch.rand(3 << 20)}
    _check(file, path, state)
    file.wait_for_pages()
    assert _mapping(path)

    def fail(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", fail)
        assert file.overwrite(state) == path.stat().st_size
        with pytest.raises(OSError, match="No space left"):
            file.overwrite({"weight": torch.rand(6 << 20)})
    _check(file, path, state)
    file.close()


def test_memory_is_freed_while_a_child_has_the_file(path: Path) -> None:
    """A process that was forked keeps descriptors. The pages of a freed file are free nevertheless."""
    file = MemoryFile(path, is_mapped=True)
    file.overwrite({"weight": torch.rand(3 << 20)})
    with path.open("rb") as left:
        path.unlink()
        file.free()
        assert os.fstat(left.fileno()).st_blocks == 0
