"""Replica groups as their ranks and the supervisor know them: variables, the lighthouse, and the groups that have reached it."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dlac_pipeline.spec.launch_spec import LaunchSpec

GROUP_VARIABLE = "DLAC_REPLICA_GROUP"
"""Variable with the number of the replica group. RANK and WORLD_SIZE are those within the group."""
REJOINS_VARIABLE = "DLAC_REJOINS"
"""Variable that is set in a process that replaces a dead one of the same attempt."""

HANG_MARGIN_S = 60.0
"""Seconds for which groups wait for a hung one beyond the moment at which the supervisor kills it, if it runs."""


def limit_s(launch: LaunchSpec) -> float:
    """Return the seconds for which groups wait for each other. One that is present may still load the state of a peer."""
    return max(launch.hang_timeout_s, launch.start_timeout_s) + HANG_MARGIN_S


def first_rank() -> int:
    """Return the number of the first rank of this rank's replica group among all ranks of the attempt. 0 without groups."""
    return int(os.environ.get(GROUP_VARIABLE, "0")) * int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True)
class LighthouseProcess:
    """The lighthouse that runs."""

    address: str
    pid: int


def write_lighthouse(folder: Path, address: str) -> None:
    """Record in the launch folder that this process is the lighthouse."""
    part = folder / "lighthouse.part"
    part.write_text(json.dumps([address, os.getpid()]))
    part.rename(_lighthouse_file(folder))


def read_lighthouse(folder: Path) -> LighthouseProcess | None:
    """Return the last lighthouse that has started, or None before the first."""
    with suppress(FileNotFoundError):
        return LighthouseProcess(*json.loads(_lighthouse_file(folder).read_text()))
    return None


def write_reached(folder: Path, group: int, address: str) -> None:
    """Record that a replica group has reached the lighthouse at an address."""
    _reached_file(folder, group).write_text(address)
    _dead_file(folder, group).unlink(missing_ok=True)


def has_reached(folder: Path, group: int, address: str) -> bool:
    """Return True if a replica group has reached this lighthouse, and no other one since."""
    with suppress(FileNotFoundError):
        return _reached_file(folder, group).read_text() == address
    return False


def mark_dead(folder: Path, group: int) -> None:
    """Record that a replica group has died. A process that takes its place has no state until it has met the others."""
    _reached_file(folder, group).unlink(missing_ok=True)
    _dead_file(folder, group).touch()


def is_dead(folder: Path, group: int) -> bool:
    """Return True if a replica group has died, and no new process of it has met the others."""
    return _dead_file(folder, group).exists()


def _lighthouse_file(folder: Path) -> Path:
    return folder / "lighthouse.json"


def _reached_file(folder: Path, group: int) -> Path:
    return folder / f"reached-{group:05d}"


def _dead_file(folder: Path, group: int) -> Path:
    return folder / f"dead-{group:05d}"
