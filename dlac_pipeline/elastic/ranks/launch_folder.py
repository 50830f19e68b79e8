"""Files of a launch folder by rank, and their names."""

import re
from pathlib import Path

_PROGRESS = re.compile(r"progress-(\d{5,})")
_LOG = re.compile(r"rank-(\d{5,})\.log")


def progress_file(folder: Path, rank: int) -> Path:
    """Its record, which is rewritten with every sign of life."""
    return folder / f"progress-{rank:05d}"


def ranks_with_progress(folder: Path) -> list[int]:
    """Return the ranks with such a file. One that is still being copied from another node does not count."""
    names = (_PROGRESS.fullmatch(path.name) for path in folder.glob("progress-*"))
    return sorted(int(name[1]) for name in names if name)


def in_hand_file(folder: Path, rank: int) -> Path:
    """Return the file of the ranges that the batch in hand moves, if the step does not determine them."""
    return folder / f"in-hand-{rank:05d}"


def notice_file(folder: Path, rank: int) -> Path:
    """Return the file that exists once the rank has received a termination notice from any source."""
    return folder / f"notice-{rank:05d}"


def stop_file(folder: Path, rank: int) -> Path:
    """Return the file that requests a stop of the rank, as SIGTERM does: the script may handle that signal itself."""
    return folder / f"stop-{rank:05d}"


def room_file(folder: Path) -> Path:
    """Return the file that asks all ranks to exit after a checkpoint, so that more nodes can join the next attempt."""
    return folder / "room"


def reason_file(folder: Path, rank: int) -> Path:
    """Return the file with the reason of the rank's failure. It has blanks until then."""
    return folder / f"error-{rank:05d}.json"


def pid_file(folder: Path, rank: int) -> Path:
    """Return the file of the rank's process id. The reaper of left-over processes uses these names too."""
    return folder / f"pid-{rank:05d}"


def log_file(folder: Path, rank: int) -> Path:
    """Its output."""
    return folder / f"rank-{rank:05d}.log"


def logs_by_rank(folder: Path) -> dict[int, Path]:
    """Return the files of output that a launch folder has, by rank."""
    found = {path: _LOG.fullmatch(path.name) for path in sorted(folder.glob("rank-*"))}
    return {int(name[1]): path for path, name in found.items() if name}
