"""Memory states of a run on this node: the states of ranks after one step, as files in a folder of shared memory.

    <memory>/dlac-<user>/<run>-<digest of its local folder>/<attempt>-<nonce>/
        copied.<first rank of a node>
        <slot>-<attempt>-<nonce>/
            <the files of the engine and of the random generators, as in a checkpoint>
            rank-<rank>.sealed
        fetched.<first rank of a node>/<attempt>-<nonce>/<slot>-<attempt>-<nonce>/
            <the same of an earlier attempt: fetched from other nodes, or links to files of this node>

Ranks write two slots in turns. A rank removes its seal before it writes a slot, and seals it afterwards. All ranks have sealed a
slot before any rank writes the next one. With several nodes a slot also has copies of another node's ranks, and `copied` has
the last step whose state another node has of a node's ranks. The attempt that resumes from a state fetches what its node lacks
into a new folder, because the earlier attempt may still write, and removes it once its ranks have loaded it.
"""

import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgpack
import psutil

from dlac_pipeline.checkpoint.restore.resume_point import Source
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.typed_rows import Columns
from dlac_pipeline.lakehouse.own_folders import open_own, remove_own
from dlac_pipeline.spec.job_spec import JobSpec

SLOTS = 2
_FORMAT_VERSION = 1
_FORGET_S = 86_400.0
"""Seconds after which the memory states of another run, which writes none any more, are removed."""
_CGROUP = Path("/sys/fs/cgroup")
_SEAL = re.compile(r"rank-[0-9]+\.sealed")
_SLOT = re.compile(r"([0-9]{6,}-[0-9a-z]+)/[0-9]-\1")
ALWAYS = 2**62
"""A step after all others: the states of a node are not copied, and no rank waits for that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trained:
    """The steps from `since` to a memory state or to a checkpoint that was not committed then, as one rank knows them."""

    since: int
    losses: list[float]
    skipped: list[int]
    advances: list[Columns]
    """Moves of streamed sources."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankState:
    """Part of a rank in a memory state."""

    attempt: int
    nonce: str
    head: str | None
    """The last checkpoint that the attempt committed, or resumed from."""
    step: int
    rank: int
    world_size: int
    readers: int
    """Number of shares in which the ranks read the batches."""
    mesh: dict[str, int]
    """Dimensions of a replica of the model, if it has several ranks."""
    engine: str
    loads_own_files: bool
    """True if a rank loads only its files and rank 0's, when as many ranks saved them."""
    leg: str
    """The leg as JSON."""
    groups: list[int]
    cursors: list[list[list[int]]]
    trained: list[Trained]
    """The steps since the head, or since an earlier checkpoint: of checkpoints in progress, then of none."""
    rows: int
    """Rows that the rank had worked on in its attempt."""
    saved_at: float = field(default_factory=time.time)
    """Time of the save in seconds since the epoch."""
    files: list[tuple[str, int]] = field(default_factory=list)
    """Path and size of each of its files."""


@dataclass(frozen=True, slots=True)
class MemoryState:
    """A whole memory state: every rank has sealed it after the same step."""

    folder: Path
    ranks: tuple[RankState, ...]
    sources: list[Source] = field(default_factory=list, compare=False)
    """The nodes that have parts of it. Empty with one node."""

    @property
    def first(self) -> RankState:
        """The part of rank 0."""
        return self.ranks[0]

    def votes(self) -> list[dict[str, Any]]:
        """The readers' cursors, as ranks vote on a checkpoint."""
        return [{"step": each.step, "groups": each.groups, "cursors": each.cursors} for each in self.ranks]

    def trained_since(self, step: int) -> Trained | None:
        """Return the steps after `step`, with the advances of all ranks. None if the state does not know all of them."""
        parts = [part for part in self.first.trained if part.since >= step]
        if not parts or parts[0].since != step:
            return None
        return Trained(
            since=step,
            losses=[loss for part in parts for loss in part.losses],
            skipped=[skipped for part in parts for skipped in part.skipped],
            advances=[
                row for rank in self.ranks for part in rank.trained if part.since >= step for row in part.advances
            ],
        )


FindStates = Callable[[], Sequence[MemoryState]]
"""Function that returns the whole memory states of a run, the newest first."""


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a rank in a memory state, as a node stores it."""

    slot: str
    """Name of its slot, the same on all nodes."""
    state: RankState

    def __post_init__(self) -> None:
        """Raise `ValueError` if the state is of another attempt than the slot."""
        found = f"{self.state.attempt:06d}-{self.state.nonce}"
        if not _SLOT.fullmatch(self.slot) or self.slot.partition("/")[0] != found:
            raise ValueError(f"expected a seal of {self.slot!r}, found one of {found!r}")


def check_memory(spec: JobSpec) -> None:
    """Raise `SpecInvalid` for a folder of shared memory that a job names, and that this node does not have."""
    memory = spec.checkpoint.memory
    default = type(spec.checkpoint).model_fields["memory"].default
    if memory not in ("", default) and not Path(memory).is_dir():
        raise SpecInvalid(
            f'expected a folder of shared memory at checkpoint.memory, found none at {memory!r}: correct it, or set "" to keep '
            "no states in memory"
        )


def memory_folder(spec: JobSpec) -> Path | None:
    """Return the folder of a run's memory states on this node, or None if none are kept, as where ranks heal each other."""
    memory = Path(spec.checkpoint.memory)
    if not spec.checkpoint.memory or spec.launch.healing or not memory.is_dir():
        return None
    place = sha256(f"{Path(spec.checkpoint.local).resolve()}/{spec.run}".encode()).hexdigest()[:12]
    return memory / f"dlac-{os.getuid()}" / f"{spec.run}-{place}"


def attempt_folder(folder: Path, attempt: int, nonce: str) -> Path:
    """Return the folder of an attempt's memory states in its run's folder."""
    return folder / f"{attempt:06d}-{nonce}"


def make_folder(folder: Path) -> None:
    """Make a folder of memory states, and those above it. Raise `OSError` if others may write one."""
    with open_own(*_place_of(folder), make=True):
        pass


def opened(folder: Path) -> AbstractContextManager[int]:
    """Open a folder of memory states, from its user's folder on. Raises as `open_own`: then nothing in it is to be trusted."""
    return open_own(*_place_of(folder))


def remove(folder: Path) -> None:
    """Remove a folder of memory states, unless it is refused as by `opened`."""
    with suppress(OSError):  # it is gone, or being removed
        remove_own(*_place_of(folder))


def _place_of(folder: Path) -> tuple[Path, Path]:
    """Return the folder in which the memory states of all users are, and the path from there."""
    above = [each.parent for each in (folder, *folder.parents) if each.name == f"dlac-{os.getuid()}"]
    if not above:
        raise FileNotFoundError(f"expected a folder of this user's memory states, found {str(folder)!r}")
    return above[-1], folder.relative_to(above[-1])


def _names_in(folder: Path) -> list[Path]:
    """Return the paths in a folder of memory states: none if it is refused, or gone."""
    with suppress(OSError), opened(folder) as here:
        return [folder / name for name in os.listdir(here)]
    return []


def slot_of(folder: Path, number: int) -> Path:
    """Return the folder of the `number`-th memory state of an attempt, in the attempt's folder."""
    return folder / f"{number % SLOTS}-{folder.name}"


def slot_name(slot: Path) -> str:
    """Return the name of a slot in the folder of its run, the same on all nodes."""
    return f"{slot.parent.name}/{slot.name}"


def slot_at(folder: Path, name: str) -> Path:
    """Return the slot of this name in the folder of a run. Raise `ValueError` if it is no name of a slot."""
    if not _SLOT.fullmatch(name):
        raise ValueError(f"expected the name of a slot, found {name!r}")
    return folder / name


def seal_file(slot: Path, rank: int) -> Path:
    """Return the file that says that a rank's files in a slot are whole."""
    return slot / f"rank-{rank:05d}.sealed"


def pack_seal(state: RankState) -> bytes:
    """Return the content of a rank's seal."""
    return bytes(msgpack.packb({"format_version": _FORMAT_VERSION, **asdict(state)}))


def parse_seal(content: bytes) -> RankState:
    """Return a rank's part of a memory state from its seal. Raise `ValueError` if it is none."""
    try:
        found = msgpack.unpackb(content)
        if found.pop("format_version") != _FORMAT_VERSION:
            raise ValueError("another version of DLAC wrote this state")
        trained = [Trained(**each) for each in found["trained"]]
        return RankState(**{**found, "trained": trained, "files": [(name, size) for name, size in found["files"]]})
    except (AttributeError, KeyError, TypeError, msgpack.UnpackException) as err:
        raise ValueError(f"expected the seal of a rank's state, found {type(err).__name__}: {err}") from err


def write_seal(slot: Path, state: RankState) -> None:
    """Seal a rank's files in a slot."""
    _write(seal_file(slot, state.rank), pack_seal(state))


def read_seals(slot: Path, ranks: Iterable[int]) -> list[RankState]:
    """Return the sealed parts of some ranks in a slot. Raise `OSError` if one has no seal, or the slot is refused."""
    return [parse_seal(_read(seal_file(slot, rank))) for rank in ranks]


def remove_seal(slot: Path, rank: int) -> None:
    """Remove a rank's seal in a slot, if it exists. Raise `OSError` if the slot does not exist, or is refused."""
    with opened(slot) as here, suppress(FileNotFoundError):
        os.unlink(seal_file(slot, rank).name, dir_fd=here)


def _read(path: Path) -> bytes:
    with opened(path.parent) as here, open(path.name, "rb", opener=partial(os.open, dir_fd=here)) as stream:
        return stream.read()


def _write(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, and rename it. Raise `OSError` if its folder is refused."""
    temporary = f"{path.name}.{os.getpid()}.tmp"
    with opened(path.parent) as here:
        with open(temporary, "wb", opener=partial(os.open, mode=0o600, dir_fd=here)) as stream:
            stream.write(content)
        os.rename(temporary, path.name, src_dir_fd=here, dst_dir_fd=here)


def read_parts(folder: Path) -> list[Part]:
    """Return the sealed parts of a run's memory states on this node. Empty if others may have written them."""
    slots = [slot for attempt in _names_in(folder) for slot in _names_in(attempt) if "-" in slot.name]
    return [part for slot in slots for part in parts_in(slot)]


def find_states(folder: Path, parts: Iterable[Part]) -> list[MemoryState]:
    """Return the memory states that have a part of every rank, the newest first. `folder` is the run's folder on this node."""
    by_state: defaultdict[tuple[object, ...], dict[int, RankState]] = defaultdict(dict)
    for part in parts:
        each = part.state
        stamp = (each.attempt, each.nonce, each.step, each.world_size, each.leg, each.engine)
        by_state[part.slot, *stamp][each.rank] = each
    found = [
        MemoryState(folder / str(key[0]), tuple(ranks[rank] for rank in range(ranks[0].world_size)))
        for key, ranks in by_state.items()
        if 0 in ranks and ranks.keys() == set(range(ranks[0].world_size))
    ]
    # nodes have different clocks
    return sorted(found, key=lambda state: (state.first.step, state.first.attempt, state.first.saved_at), reverse=True)


def read_states(folder: Path) -> list[MemoryState]:
    """Return the whole memory states of a run on this node, the newest first. None if others may have written them."""
    return find_states(folder, read_parts(folder))


def read_slot(slot: Path) -> MemoryState | None:
    """Return the memory state in a slot, or None if a rank has not sealed it, or a file is missing."""
    return next(iter(find_states(slot.parent.parent, parts_in(slot))), None)


def parts_in(slot: Path) -> list[Part]:
    """Return the sealed parts in a slot whose files have their sizes. Empty if others may have written them."""
    parts: list[Part] = []
    for path in _names_in(slot):
        if _SEAL.fullmatch(path.name):
            with suppress(OSError, ValueError):  # being written, or of another version
                part = Part(slot_name(slot), parse_seal(_read(path)))
                with opened(slot) as here:
                    if all(os.stat(name, dir_fd=here).st_size == size for name, size in part.state.files):
                        parts.append(part)
    return parts


def mark_copied(folder: Path, first_rank: int, step: int) -> None:
    """Note the last step whose state of a node's ranks another node has, in the folder of an attempt."""
    _write(folder / f"copied.{first_rank:05d}", str(step).encode())


def copied_step(folder: Path, first_rank: int) -> int:
    """Return the step that `mark_copied` noted, or 0."""
    with suppress(OSError, ValueError):
        return int(_read(folder / f"copied.{first_rank:05d}"))
    return 0


def held_file(folder: Path, rank: int) -> Path:
    """Return the file of a rank's part of the last step, in the folder of an attempt."""
    return folder / f"held.{rank:05d}"


def hold_part(folder: Path, rank: int, content: bytes) -> Path:
    """Write a rank's part of the last step. Return its file."""
    _write(path := held_file(folder, rank), content)
    return path


def all_hold(folder: Path, ranks: Iterable[int]) -> bool:
    """Return whether ranks hold a step, and no rank has ended its try to keep the state after it."""
    names = {each.name for each in _names_in(folder)}
    return names.issuperset(held_file(folder, rank).name for rank in ranks) and "kept" not in names


def begin_keeping(folder: Path) -> bool:
    """Return whether this rank is the first one that wants to keep the state after the last step."""
    with suppress(FileExistsError), opened(folder) as here:
        os.close(os.open("keeping", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=here))
        return True
    return False


def end_keeping(folder: Path) -> None:
    """Note that no rank will keep a state any more."""
    _write(folder / "kept", b"")


def fetched_folder(folder: Path, first_rank: int) -> Path:
    """Return the folder of the state that a node fetches, in the new attempt's folder. It is like the folder of a run."""
    return folder / f"fetched.{first_rank:05d}"


def remove_state(state: MemoryState) -> None:
    """Remove the states of the attempt of a state on this node, also those to which a fetched one has links."""
    attempts = {state.folder.parent}
    for rank in state.ranks:
        with suppress(OSError), opened(state.folder) as here:  # a seal of its own is no link
            attempts.add(Path(os.readlink(seal_file(state.folder, rank.rank).name, dir_fd=here)).parents[1])
    for each in attempts:
        remove(each)


def forget_states(folder: Path, *, before: int) -> None:
    """Remove the memory states of a run's attempts before the attempt `before`, and conversions of these states."""
    for each in _names_in(folder):
        number = each.name.partition("-")[0]
        if not number.isdigit() or int(number) < before:
            remove(each)
    remove_if_empty(folder)


def remove_if_empty(folder: Path) -> None:
    """Remove the folder of a run's memory states if it has no attempt, and is not refused."""
    with suppress(OSError), opened(folder), opened(folder.parent) as above:
        os.rmdir(folder.name, dir_fd=above)


def forget_other_slots(folder: Path, state: MemoryState | None, *, before: int) -> int:
    """Remove the slots of a run's attempts before the attempt `before`, except a state's slot, and the states that they fetched.

    Killed supervisors leave the states that they fetched. No slot has a link to such a state. Return the bytes that stay.
    """
    for slot in _of_earlier(folder, "-", before=before):
        if state is None or slot_name(slot) != slot_name(state.folder):
            remove(slot)
    for fetched in _of_earlier(folder, "fetched.", before=before):
        remove(fetched)
    return sum(map(bytes_in, _of_earlier(folder, "-", before=before)))


def _of_earlier(folder: Path, mark: str, *, before: int) -> list[Path]:
    """Return the entries with `mark` in their names in the folders of a run's attempts before the attempt `before`."""
    numbers = [(each.name.partition("-")[0], each) for each in _names_in(folder)]
    attempts = [each for number, each in numbers if number.isdigit() and int(number) < before]
    return [each for attempt in attempts for each in _names_in(attempt) if mark in each.name]


def forget_old_states(folder: Path) -> None:
    """Remove the memory states of other runs of this user that have written none for a day."""
    for run in _names_in(folder.parent):
        with suppress(OSError):  # the run ends just now
            if run != folder and _written_at(run) < time.time() - _FORGET_S:
                remove(run)


def _written_at(folder: Path) -> float:
    with opened(folder) as here:
        return max(os.fstat(inner).st_mtime for *_, inner in os.fwalk(".", dir_fd=here))


def bytes_in(slot: Path) -> int:
    """Return the bytes of a slot, files in progress included."""
    total = 0
    with suppress(OSError), opened(slot) as here:  # removed just now
        for _, _, names, inner in os.fwalk(".", dir_fd=here):
            for name in names:
                with suppress(OSError):  # renamed just now
                    total += os.stat(name, dir_fd=inner).st_size
    return total


def room_for_states(memory: Path) -> int:
    """Return the bytes that memory states may have: free in the folder, and in the memory of this node or container."""
    space = os.statvfs(memory)
    room = min(space.f_bavail * space.f_frsize, psutil.virtual_memory().available)
    with suppress(OSError, ValueError, KeyError):  # without a limit, or another version of cgroups
        limit = int((_CGROUP / "memory.max").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        room = min(room, limit - int((_CGROUP / "memory.current").read_text()) + int(stat["inactive_file"]))
    return room


def check_unchanged(state: MemoryState) -> bool:
    """Return whether a state has not changed since it was read: an attempt that is fenced off may still write."""
    now = read_slot(state.folder)
    return now is not None and are_same(now.ranks, state.ranks)


def are_same(parts: Sequence[RankState], others: Sequence[RankState]) -> bool:
    """Return whether parts have the same seals. The parts differ from themselves if a loss is NaN."""
    return list(map(pack_seal, parts)) == list(map(pack_seal, others))
