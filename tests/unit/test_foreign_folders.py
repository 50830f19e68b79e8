"""Nothing is removed from, or read from, a folder that another user has prepared in a shared place such as /dev/shm."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from dlac_pipeline.checkpoint.commit.local_copies import LocalCopies
from dlac_pipeline.checkpoint.store import Tiers
from dlac_pipeline.extensions.buddies.buddy import marks_of_seals
from dlac_pipeline.extensions.buddies.server import home_of
from dlac_pipeline.lakehouse.errors import StoreUnavailable
from dlac_pipeline.lakehouse.own_folders import open_own, remove_own
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.memory_file import MemoryFile
from dlac_pipeline.memory_states.states import MemoryState
from dlac_pipeline.supervise.ranks.launch_folders import forget_launches
from dlac_pipeline.supervise.ranks.rank_logs import cut_middle
from tests.memory_states import keep, part_of

_STRANGER = 65_534
pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root can make folders of another user")


@dataclass(frozen=True)
class Trap:
    """Memory in which the folder of this user's states was made by another user, with this user's own states in it."""

    memory: Path
    run: Path
    slot: Path

    @property
    def state(self) -> MemoryState:
        """The whole state of one rank in the slot."""
        return MemoryState(self.slot, (part_of(0, world_size=1),))


def _foreign_folder(memory: Path) -> Trap:
    run = memory / f"dlac-{os.getuid()}" / "run"
    keep(run, part_of(0, world_size=1))
    os.chown(run.parent, _STRANGER, _STRANGER)
    return Trap(memory, run, run / "000002-b" / "0-000002-b")


def _writable_folder(memory: Path) -> Trap:
    trap = _foreign_folder(memory)
    os.chown(trap.run.parent, os.getuid(), os.getgid())
    trap.run.parent.chmod(0o777)
    return trap


def _link(memory: Path, *, at: str) -> Trap:
    """Put a link to this user's own files in place of a folder."""
    trap = _foreign_folder(memory)
    place = trap.run if at == "run" else trap.run.parent
    os.chown(trap.run.parent, os.getuid(), os.getgid())
    place.rename(memory / "precious")
    place.symlink_to(memory / "precious")
    os.lchown(place, _STRANGER, _STRANGER)
    return trap


_TRAPS: dict[str, Callable[[Path], Trap]] = {
    "foreign": _foreign_folder,
    "writable": _writable_folder,
    "link": lambda memory: _link(memory, at="user"),
    "inner link": lambda memory: _link(memory, at="run"),
}


@pytest.fixture(params=list(_TRAPS))
def trap(tmp_path: Path, request: pytest.FixtureRequest) -> Trap:
    """A trap of each kind in a place where every user may write."""
    memory = tmp_path / "memory"
    memory.mkdir()
    memory.chmod(0o1777)
    return _TRAPS[request.param](memory)


def test_refused_states_stay(trap: Trap) -> None:
    """Each removal of memory states leaves what it finds in a refused folder."""
    before = _files_of(trap.memory)
    states.forget_states(trap.run, before=9)
    assert states.forget_other_slots(trap.run, None, before=9) == 0
    os.utime(trap.run, (0, 0))
    states.forget_old_states(trap.run.with_name("another"))
    states.remove_state(trap.state)
    states.remove(trap.run)
    states.remove_if_empty(trap.run)
    with pytest.raises(PermissionError):
        states.remove_seal(trap.slot, 0)
    assert _files_of(trap.memory) == before


def test_refused_states_are_not_read(trap: Trap) -> None:
    """Each look into memory states finds nothing in a refused folder, and nothing is written there."""
    (trap.run / "000002-b" / "copied.00000").write_text("7")
    before = _files_of(trap.memory)
    assert states.read_parts(trap.run) == []
    assert states.read_states(trap.run) == []
    assert states.read_slot(trap.slot) is None
    assert not states.check_unchanged(trap.state)
    assert states.bytes_in(trap.slot) == states.copied_step(trap.run / "000002-b", 0) == 0
    refused: list[Callable[[], object]] = [
        lambda: states.read_seals(trap.slot, [0]),
        lambda: marks_of_seals(trap.slot, [0]),
        lambda: states.mark_copied(trap.run / "000002-b", 0, 8),
        lambda: states.write_seal(trap.slot, part_of(1)),
        lambda: states.make_folder(trap.run / "000003-c"),
        lambda: home_of(trap.run),
    ]
    for look in refused:
        with pytest.raises(PermissionError, match="expected a folder"):
            look()
    assert _files_of(trap.memory) == before


def _files_of(memory: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_size for path in sorted(memory.rglob("*"))}


def test_own_states_are_removed(tmp_path: Path) -> None:
    """The same folders of this user are removed, in a place where every user may write."""
    tmp_path.chmod(0o1777)
    run = tmp_path / f"dlac-{os.getuid()}" / "run"
    keep(run, part_of(0, world_size=1))
    (state,) = states.read_states(run)
    assert states.bytes_in(state.folder) > sum(size for _, size in state.first.files)
    states.forget_states(run, before=9)
    assert not run.exists()


def test_linked_file_is_not_written(tmp_path: Path) -> None:
    """A link in place of a state's file or of a log leads to no other file."""
    (tmp_path / "thesis").write_bytes(bytes(100_000))
    (tmp_path / "link").symlink_to(tmp_path / "thesis")
    with pytest.raises(OSError, match="symbolic links"):
        MemoryFile(tmp_path / "link", is_mapped=False)
    with pytest.raises(OSError, match="symbolic links"):
        cut_middle(tmp_path / "link", 20_000)


def test_checkpoints_spare_linked_folders(tmp_path: Path) -> None:
    """Another user's link in place of an attempt's folder, or of the run's, leads to no removal. A link of this user does."""
    precious, run = tmp_path / "precious", tmp_path / "local" / "r"
    (precious / "step-000000001-a").mkdir(parents=True)
    run.mkdir(parents=True)
    (run / "attempt-0001").symlink_to(precious)
    os.lchown(run / "attempt-0001", _STRANGER, _STRANGER)
    files = StoreFiles(deadline_s=0.0)
    tiers = Tiers(run="r", local=tmp_path / "local", store=str(tmp_path / "store"), files=files)
    LocalCopies(tiers, keep=1, evicts=True, resumed_from=None).committed("attempt-0002/step-000000002-b")
    with pytest.raises(StoreUnavailable, match="link of another user"):
        files.remove(str(run / "attempt-0001" / "step-000000001-a"))
    (precious / "launch-a").mkdir()
    forget_launches(run / "attempt-0001", keep=0)
    assert sorted(path.name for path in precious.iterdir()) == ["launch-a", "step-000000001-a"]
    os.lchown(run / "attempt-0001", os.getuid(), os.getgid())
    files.remove(str(run / "attempt-0001" / "step-000000001-a"))
    assert [path.name for path in precious.iterdir()] == ["launch-a"]


def test_folder_is_made_and_removed(tmp_path: Path) -> None:
    """The descriptor is of the folder, which only this user can read. Another user's folder of that name is an error."""
    with open_own(tmp_path, "a/b", make=True) as folder:
        assert os.path.samestat(os.fstat(folder), os.stat(tmp_path / "a" / "b"))
        assert os.fstat(folder).st_mode & 0o777 == 0o700
    remove_own(tmp_path, "a/b")
    os.chown(tmp_path / "a", _STRANGER, _STRANGER)
    with pytest.raises(PermissionError, match="only this user can write"), open_own(tmp_path, "a/b", make=True):
        pass
    assert os.listdir(tmp_path / "a") == []
