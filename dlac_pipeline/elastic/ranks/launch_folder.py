"""What lies in a launch folder by rank, and under which names."""

from __future__ import annotations

import re
from pathlib import Path

_PROGRESS = re.compile(r"progress-(\d{5,})")
_LOG = re.compile(r"rank-(\d{5,})\.log")


def progress_file(folder: Path, rank: int) -> Path:
    """Its record, which is rewritten with every sign of life."""
    return folder / f"progress-{rank:05d}"


def ranks_with_progress(folder: Path) -> list[int]:
    """Those that have such a file; one that is being brought from another machine is none yet."""
    names = (_PROGRESS.fullmatch(path.name) for path in folder.glob("progress-*"))
    return sorted(int(name[1]) for name in names if name)


def in_hand_file(folder: Path, rank: int) -> Path:
    """What the batch in its hand moves, if the steps alone do not say it."""
    return folder / f"in-hand-{rank:05d}"


def notice_file(folder: Path, rank: int) -> Path:
    """Which is there once it has been told to leave, whoever told it."""
    return folder / f"notice-{rank:05d}"


def room_file(folder: Path) -> Path:
    """Which is there once all are to leave, behind a checkpoint, for more machines to take part in the next attempt."""
    return folder / "room"


def reason_file(folder: Path, rank: int) -> Path:
    """Why it fails; blanks until it does."""
    return folder / f"error-{rank:05d}.json"


def pid_file(folder: Path, rank: int) -> Path:
    """Its process, once it has begun; the undertaker knows these names as well."""
    return folder / f"pid-{rank:05d}"


def log_file(folder: Path, rank: int) -> Path:
    """Its output."""
    return folder / f"rank-{rank:05d}.log"


def logs_by_rank(folder: Path) -> dict[int, Path]:
    """Return the files of output that a launch folder has, by rank."""
    found = {path: _LOG.fullmatch(path.name) for path in sorted(folder.glob("rank-*"))}
    return {int(name[1]): path for path, name in found.items() if name}
