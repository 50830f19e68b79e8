"""The ranks of one attempt on this machine, as processes: each in a process group of its own, none outliving its supervisor."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from catalog.errors import TrainingFailed
from catalog.masking import mask_secrets
from dlac_pipeline.ranks import undertaker
from dlac_pipeline.ranks.addresses import GLOO_INTERFACE, LOOPBACK, interface_of
from dlac_pipeline.ranks.launch_folder import log_file, notice_file, reason_file
from dlac_pipeline.ranks.progress import Phase, Progress, read_progress
from dlac_pipeline.ranks.rank import (
    LAUNCH_VARIABLE,
    RUN_VARIABLE,
    SUPERVISOR_VARIABLE,
    held_signals,
    reason_not_started,
)
from dlac_pipeline.ranks.rank_logs import LogBound
from dlac_pipeline.ranks.script_errors import Origin
from dlac_pipeline.ranks.share import Share
from dlac_pipeline.read.memory import ALLOCATOR_SETTINGS
from dlac_pipeline.spec import JobSpec

HANG = "Hang"
"""Kind of the failure of a rank that gives no sign of life."""
_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
_KILLED_WITHIN_S = 60.0
"""What a killed rank gets to be gone: the kernel gives back its memory first, and that of its accelerator."""
_UNDERTAKER_WITHIN_S = 5.0
NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
"""The same of NCCL, which looks for itself where there are several nodes."""
GROUP_SETTINGS = {"TORCH_GLOO_LAZY_INIT": "1"}
"""Ranks connect when they first talk to each other. Else each group of n ranks begins with n * n questions to one store."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit:
    """How one rank ended."""

    rank: int
    code: int
    """Exit status; negative: the signal that killed it."""
    kind: str = ""
    """Class of the error that the rank left behind, if it did."""
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """What the error says besides, for programs."""
    at: float = math.inf
    """When it left its reason behind, in seconds since the epoch."""
    where: str = ""
    """The innermost line of the user's code in the traceback of its exception."""
    place: str = ""
    """Digest of the class of the exception and of the line that raised it; empty: it recorded no exception."""
    origin: Origin = ""
    traceback: str = ""
    """The frames of the user's code."""

    def __str__(self) -> str:
        if self.code < 0:
            return f"rank {self.rank} was killed by {signal_name(-self.code)}"
        status = self.detail.get("status", self.code)
        reason = f" of {self.kind}: {self.message}" if self.kind else f" with exit status {status}"
        return f"rank {self.rank} died{reason}"


def signal_name(number: int) -> str:
    """A signal's name; most of the real-time ones have none."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class RankProcess(Protocol):
    """A started rank."""

    @property
    def pid(self) -> int:
        """Its process id; waits until it has one; 0: it never will."""

    @property
    def started(self) -> bool:
        """Whether its process id is known, or that it never will be."""

    def poll(self) -> int | None:
        """Its exit status; negative: the signal that killed it; None: it runs."""

    def reason(self) -> dict[str, Any]:
        """Why it never started, as the fields of `Exit`; empty: it has, or still may."""

    def gone(self, within_s: float) -> bool:
        """Whether it has ended; waits for that, so long at most."""

    def signal(self, number: signal.Signals) -> None:
        """Signal its process group, if it has one by now; if not, it never starts."""


class Spawned:
    """A rank that is a new Python."""

    started = True

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid
        self.poll = process.poll

    def reason(self) -> dict[str, Any]:
        """It has started."""
        return {}

    def gone(self, within_s: float) -> bool:
        """Whether it has ended; waits for that, so long at most."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(within_s)
        return self._process.returncode is not None

    def signal(self, number: signal.Signals) -> None:
        """Signal its process group."""
        signal_group(self.pid, number)


class NotStarted:
    """A rank that could not be started; it has failed before it was anything."""

    pid = 0
    started = True

    def __init__(self, err: OSError) -> None:
        self._reason = reason_not_started(err)

    def poll(self) -> int:
        """As if it had died."""
        return 1

    def reason(self) -> dict[str, Any]:
        """What the operating system said."""
        return self._reason

    def gone(self, within_s: float) -> bool:
        """It never was."""
        return True

    def signal(self, number: signal.Signals) -> None:
        """There is nothing to signal."""


def signal_group(pid: int, number: signal.Signals) -> None:
    """Signal a process group, if there is one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


Starter = Callable[[JobSpec, dict[str, str], Path], RankProcess]
"""Starts a rank in a process group of its own: what differs in its environment, and the file of its output. May raise OSError."""


def environment_of(spec: JobSpec) -> dict[str, str]:
    """The environment that the ranks of a job have in common."""
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    own = {RUN_VARIABLE: spec.run, SUPERVISOR_VARIABLE: str(os.getpid())}
    alone = {} if spec.launch.max_nodes > 1 else _loopback_settings()
    return {**ALLOCATOR_SETTINGS, **GROUP_SETTINGS, **alone, **os.environ, **threads, **spec.launch.env, **own}


def _loopback_settings() -> dict[str, str]:
    """Settings of ranks that all are on one node: they talk through loopback, where no other node reaches them."""
    interface = interface_of(LOOPBACK)
    return {GLOO_INTERFACE: interface, NCCL_INTERFACE: interface} if interface else {}


def spawn_rank(spec: JobSpec, place: dict[str, str], log: Path) -> RankProcess:
    """A new Python."""
    command = [sys.executable, "-m", "dlac_pipeline.ranks.rank", spec.launch.script, *spec.launch.args]
    environment = environment_of(spec) | place
    with log.open("ab") as stream:
        return Spawned(
            subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream, process_group=0
            )
        )


class RankGroup:
    """This machine's processes of one attempt; started on creation by `starter`: a new Python each, unless another is given."""

    def __init__(self, spec: JobSpec, folder: Path, share: Share, starter: Starter = spawn_rank) -> None:
        """A rank that cannot be started is one that has failed.

        Raises:
            TrainingFailed: not even the undertaker can be started.
        """
        self.folder = folder
        self.ranks = range(share.first_rank, share.first_rank + share.ranks)
        self.started_at = time.time()
        self._undertaker = _start_undertaker(folder)
        self._logs = LogBound({rank: log_file(folder, rank) for rank in self.ranks}, spec.launch.log_mb * 2**20)
        self._processes: dict[int, RankProcess] = {}
        try:
            for rank in self.ranks:
                self._processes[rank] = _started(starter, spec, _place_of(rank, share, folder), log_file(folder, rank))
        except BaseException:
            self.end()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids in the order of ranks, 0 for one that could not be started; waits until all have."""
        return [process.pid for process in self._processes.values()]

    @property
    def started(self) -> bool:
        """Whether those are known by now."""
        return all(process.started for process in self._processes.values())

    def progress(self) -> list[Progress | None]:
        """Last sign of life of each rank, in their order."""
        return [read_progress(self.folder, rank) for rank in self.ranks]

    def failures(self) -> list[Exit]:
        """Ranks that ended badly. One that died without a reason after all its work, while Python shut down, did not.

        Once there is one, also those that are still on their way out, with their reasons: theirs may be the cause.
        """
        ended = [exit_ for exit_ in self._exits() if exit_.code != 0 and (exit_.kind or not self._was_done(exit_.rank))]
        return ended and [*ended, *self._leaving()]

    def kept_errors(self) -> list[Exit]:
        """Ranks that ended well although they have left the reason of a failure behind: the script kept it to itself."""
        return [exit_ for exit_ in self._exits() if exit_.code == 0 and exit_.kind]

    def all_exited(self) -> bool:
        """Whether no rank is running."""
        return all(process.poll() is not None for process in self._processes.values())

    @property
    def noticed(self) -> bool:
        """Whether a rank has been told to leave, whoever told it."""
        return any(notice_file(self.folder, rank).exists() for rank in self.ranks)

    def last_words(self, rank: int) -> dict[str, str]:
        """Where a rank's log is, and how it ends."""
        path = log_file(self.folder, rank)
        said = b""
        with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:  # it may never have started
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            said = stream.read(_TAIL_BYTES)
        tail = "\n".join(said.decode(errors="replace").splitlines()[-_TAIL_LINES:])
        return {"log": str(path), "log_tail": mask_secrets(tail)}

    def ask_to_stop(self) -> None:
        """SIGTERM: checkpoint at the next step boundary and leave."""
        self._signal(signal.SIGTERM)

    def end(self) -> None:
        """SIGKILL every rank's process group and wait until all are gone.

        Raises:
            TrainingFailed: one is not, as the kernel still waits for a device or a file system on its behalf.
        """
        self._signal(signal.SIGKILL)
        deadline = time.monotonic() + _KILLED_WITHIN_S
        gone = {rank: each.gone(max(0.0, deadline - time.monotonic())) for rank, each in self._processes.items()}
        _dismiss(self._undertaker)
        self._logs.close()
        if not all(gone.values()):
            left = {rank: self._processes[rank].pid for rank in self.ranks if not gone[rank]}
            raise TrainingFailed(
                f"expected killed ranks to be gone within {_KILLED_WITHIN_S:.0f} s, found process {left!r} (by rank): look for "
                "a device or a network file system that does not answer, and recover the run on another machine"
            )

    def _exits(self) -> list[Exit]:
        found = []
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None:
                found.append(Exit(rank=rank, code=code, **self._reason(rank)))
        return found

    def _leaving(self) -> list[Exit]:
        running = [rank for rank, process in self._processes.items() if process.poll() is None]
        return [Exit(rank=rank, code=1, **reason) for rank in running if (reason := self._reason(rank))]

    def _reason(self, rank: int) -> dict[str, Any]:
        """What the rank has left behind of why it fails, or why it never started; nothing, if nothing, or only half of it."""
        try:
            reason: dict[str, Any] = json.loads(reason_file(self.folder, rank).read_bytes())
        except (FileNotFoundError, ValueError):
            return self._processes[rank].reason()
        return reason

    def _was_done(self, rank: int) -> bool:
        progress = read_progress(self.folder, rank)
        return progress is not None and progress.phase == Phase.DONE

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes.values():
            if process.poll() is None or number == signal.SIGKILL:
                process.signal(number)


def _started(starter: Starter, spec: JobSpec, place: dict[str, str], log: Path) -> RankProcess:
    try:
        return starter(spec, place, log)
    except OSError as err:
        return NotStarted(err)


def _start_undertaker(folder: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-I", "-S", str(undertaker.__file__), str(folder)]
    try:
        with held_signals():
            return subprocess.Popen(command, stdin=subprocess.PIPE, process_group=0)
    except OSError as err:
        raise TrainingFailed(f"expected to start a process beside the ranks, found {err}") from err


def _dismiss(process: subprocess.Popen[bytes]) -> None:
    """The undertaker is told that its work is done; it may be gone, or have been told."""
    if process.returncode is not None:
        return
    try:
        process.communicate(b"done\n", timeout=_UNDERTAKER_WITHIN_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def _place_of(rank: int, share: Share, folder: Path) -> dict[str, str]:
    """The environment in which the ranks differ, from each other and from other attempts; names as torchrun's."""
    through = {GLOO_INTERFACE: share.interface} if share.interface else {}
    return {
        **through,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank - share.first_rank),
        "GROUP_RANK": str(share.node),
        "WORLD_SIZE": str(share.world_size),
        "LOCAL_WORLD_SIZE": str(share.ranks),
        "MASTER_ADDR": share.address,
        "MASTER_PORT": str(share.port),
        LAUNCH_VARIABLE: str(folder),
    }
