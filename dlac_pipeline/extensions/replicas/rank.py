"""Replica groups as their ranks and the supervisor know them: variables, the lighthouse, and the groups that have reached it."""

import fcntl
import json
import os
import time
import urllib.request
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from dlac_pipeline.elastic.ranks.environment import defaults_of
from dlac_pipeline.elastic.ranks.this_process import GROUP_VARIABLE, this_process
from dlac_pipeline.lakehouse.durable_io import lock_at_once
from dlac_pipeline.lakehouse.errors import RunBusy, SpecInvalid
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_spec import LaunchSpec

REJOINS_VARIABLE = "DLAC_REJOINS"
"""Variable that is set in a process that replaces a dead one of the same attempt."""
ADDRESS_VARIABLE = "DLAC_GROUP_ADDRESS"
"""Variable with the address of this node for the groups on the others. Unset: there are none."""
OWN_GROUP_VARIABLE = "REPLICA_GROUP_ID"
"""Variable with the number of the replica group without a supervisor. torchft has named it."""

SETTINGS = {"TORCH_GLOO_LAZY_INIT": "0", "RUST_LOG": "error"}
"""Variables of the ranks of groups, unless they are set. Groups connect at once: one that waits for the first connection of a
dead one would wait for the time limit. torchft would log each step."""

HEARTBEAT_TIMEOUT_S = 0.4
"""Seconds without a heartbeat after which a group is dead. Its manager sends one every 50 ms, from a separate thread."""
HANG_MARGIN_S = 60.0
"""Seconds for which groups wait for a hung one beyond the moment at which the supervisor kills it, if it runs."""


def check_torchft() -> None:
    """Raise `SpecInvalid` without torchft."""
    if find_spec("torchft") is None:
        raise SpecInvalid("expected torchft for launch.replicas, found none: pip install 'dlac-pipeline[torchft]'")


def take_own_group(spec: JobSpec) -> None:
    """Take the number of this process's replica group from the environment. Raise `SpecInvalid` if it or the launch has none."""
    launch, number = spec.launch, os.environ.get(OWN_GROUP_VARIABLE, "")
    if not number.isdecimal() or int(number) >= launch.replicas:
        raise SpecInvalid(
            f"expected {OWN_GROUP_VARIABLE} of 0 to {launch.replicas - 1} for a replica group that `dlac train` does not start, "
            f"found {number or 'none'!r}: start each group with a torchrun of its own, and with its number"
        )
    ranks, ranks_here = this_process().world_size, this_process().ranks_here or 1
    if not ranks == ranks_here == launch.ranks_per_replica:
        raise SpecInvalid(
            f"expected launch.ranks_per_replica = {launch.ranks_per_replica} ranks of group {number} on this node, found "
            f"{ranks} ranks, {ranks_here} of them here: give torchrun --nproc-per-node {launch.ranks_per_replica}"
        )
    if spec.event_receiver() is not None:
        raise SpecInvalid(
            "expected no listeners with replica groups that `dlac train` does not start, found some: leave out [listeners]"
        )
    check_torchft()
    os.environ[GROUP_VARIABLE] = number
    for name, value in {**defaults_of(spec), **SETTINGS}.items():
        os.environ.setdefault(name, value)


def groups_of(first_rank: int, ranks: int, size: int) -> range:
    """Return the groups of `size` ranks of a node."""
    return range(first_rank // size, (first_rank + ranks) // size)


def limit_s(launch: LaunchSpec) -> float:
    """Return the seconds for which groups wait for each other. One that is present may still load the state of a peer."""
    return launch.start_timeout_s + HANG_MARGIN_S


DEAD = "dead"
"""Presence of a dead group."""
HELD_WITHIN_S = 10.0
_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class LighthouseProcess:
    """The lighthouse that runs."""

    address: str
    pid: int


def open_directly(request: str | urllib.request.Request, timeout_s: float) -> Any:
    """Open a URL of the groups. A proxy of the environment may have no way to it."""
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s)


def url_host(address: str) -> str:
    """Return an address as URLs have it."""
    return f"[{address}]" if ":" in address else address


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


def has_reached(folder: Path, group: int, address: str) -> bool:
    """Return True if a replica group has reached this lighthouse, and no other one since."""
    return read_presence(folder, group) == address and not _has_left(folder, group)


def mark_dead(folder: Path, group: int) -> None:
    """Record that a replica group has died. A process that takes its place has no state until it has met its peers."""
    write_presence(folder, group, DEAD)


def is_dead(folder: Path, group: int) -> bool:
    """Return True if a replica group has died, and no new process of it has met its peers."""
    return read_presence(folder, group) == DEAD or _has_left(folder, group)


def read_presence(folder: Path, group: int) -> str:
    """Return the address of the lighthouse that a replica group has reached, or `DEAD`. Empty: neither yet."""
    with suppress(FileNotFoundError):
        return _presence_file(folder, group).read_text()
    return ""


def write_presence(folder: Path, group: int, presence: str) -> None:
    """Record the lighthouse that a replica group has reached, or `DEAD`."""
    _presence_file(folder, group).write_text(presence)


def has_held(folder: Path, group: int) -> bool:
    """Return True if a process of a replica group has had `hold_group` in this launch."""
    return _held_file(folder, group).exists()


def hold_group(folder: Path, group: int) -> int:
    """Lock a replica group for this process, its first rank, until it ends. Return the descriptor.

    Only groups without a supervisor do. Raise `RunBusy` if another process keeps the lock. A dead one loses it within moments.
    """
    descriptor = os.open(_held_file(folder, group), os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + HELD_WITHIN_S
    while not lock_at_once(descriptor, fcntl.LOCK_EX):
        if time.monotonic() > deadline:
            holder = os.pread(descriptor, 20, 0).decode()
            os.close(descriptor)
            raise RunBusy(
                f"expected one process with {OWN_GROUP_VARIABLE}={group}, found another one alive (process {holder}): give each "
                "group a number of its own, from 0 on"
            )
        time.sleep(_POLL_S)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, str(os.getpid()).encode(), 0)
    return descriptor


def is_held(folder: Path, group: int) -> bool:
    """Return True while the process lives that has locked a replica group."""
    return has_held(folder, group) and not _has_left(folder, group)


def _has_left(folder: Path, group: int) -> bool:
    """Return True if the process has ended that had locked a replica group."""
    with suppress(FileNotFoundError):
        descriptor = os.open(_held_file(folder, group), os.O_RDONLY)
        try:
            return lock_at_once(descriptor, fcntl.LOCK_SH)
        finally:
            os.close(descriptor)
    return False


def _held_file(folder: Path, group: int) -> Path:
    return folder / f"group-{group:05d}.lock"


def _lighthouse_file(folder: Path) -> Path:
    return folder / "lighthouse.json"


def _presence_file(folder: Path, group: int) -> Path:
    return folder / f"presence-{group:05d}"
