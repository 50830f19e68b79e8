"""The ranks of one attempt on this node: heartbeats, exits, logs, and signals."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlac_pipeline.elastic.ranks.launch_folder import log_file, notice_file, reason_file, room_file, stop_file
from dlac_pipeline.elastic.ranks.processes import RankProcesses, Reason
from dlac_pipeline.elastic.ranks.script_errors import Origin
from dlac_pipeline.lakehouse.errors import TrainingFailed
from dlac_pipeline.lakehouse.masking import mask_secrets
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, read_heartbeat
from dlac_pipeline.supervise.ranks.rank_logs import MOST_LOG_BYTES, LogBound

if TYPE_CHECKING:
    from dlac_pipeline.elastic.sealed_store import Message
    from dlac_pipeline.lakehouse.ledger.recoveries import Recovery
    from dlac_pipeline.supervise.ranks.rank_events import Event

_TAIL_LINES = 20
_TAIL_BYTES = 64 * 1024
KILLED_WITHIN_S = 60.0
"""Seconds for a killed rank to disappear: the kernel first frees its memory and that of its accelerator."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankError:
    """The error that a rank recorded. Empty: it recorded none."""

    kind: str = ""
    """Class of the error."""
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    """Further facts of the error, for programs."""
    where: str = ""
    """The innermost line of the user's code in the traceback of the rank's exception."""
    place: str = ""
    """Digest of the exception's class and of the line that raised it. Empty if no exception was recorded."""
    origin: Origin = ""
    traceback: str = ""
    """The frames of the user's code."""

    @property
    def policy(self) -> str:
        """The entry of `dlac.row_policies` that finds the rows to blame for the error. Empty: the error names none."""
        return str(self.detail.get("policy", ""))


@dataclass(frozen=True, kw_only=True, slots=True)
class Exit(RankError):
    """The end of one rank, and the error that it recorded."""

    rank: int
    code: int
    """Exit status, or the negative number of the signal that killed the rank."""
    at: float = math.inf
    """Moment at which the rank recorded its reason, in seconds since the epoch."""

    def __str__(self) -> str:
        if self.code < 0:
            names = {each.value: each.name for each in signal.Signals}  # most real-time signals have none
            return f"rank {self.rank} was killed by {names.get(-self.code, f'signal {-self.code}')}"
        status = self.detail.get("status", self.code)
        reason = f" of {self.kind}: {self.message}" if self.kind else f" with exit status {status}"
        return f"rank {self.rank} died{reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejoined:
    """Ranks that were replaced within their attempt, and take part in it again. Moments are in seconds since the epoch."""

    event: Event
    """Event of their return, which names them."""
    cause: str
    noticed_by: str
    failed_at: float
    """Moment of the dead process's last heartbeat."""
    noticed_at: float
    had_batch: bool
    """True if it died with a batch, which was read again."""
    heartbeat: RankHeartbeat
    """Heartbeat of the first of these ranks after a finished step."""

    def to_event(self, recovery: Recovery) -> Event:
        """Return the event of their row of `recoveries`."""
        return {**self.event, "step": recovery.resumed_step, "took_s": recovery.total_s}


class RankGroup:
    """The ranks of one attempt on this node. Each has a process group of its own, and none outlives its supervisor."""

    rows_of_dead = 0
    """Rows that ranks had worked on whose processes were replaced in this attempt."""

    def __init__(self, folder: Path, processes: RankProcesses, *, server_log: Path | None = None) -> None:
        """Watch the ranks and their logs. `server_log` is the output of the process that forks them, if one does."""
        self.folder = folder
        self.ranks = processes.ranks
        self.processes = processes
        self.started_at = time.time()
        self._server_log = server_log
        self._server_log_start = server_log.stat().st_size if server_log and server_log.exists() else 0
        self._logs = LogBound({rank: log_file(folder, rank) for rank in self.ranks}, MOST_LOG_BYTES)

    def heartbeats(self) -> list[RankHeartbeat | None]:
        """Return the last heartbeat of each rank, in rank order."""
        return [read_heartbeat(self.folder, rank) for rank in self.ranks]

    def failures(self) -> list[Exit]:
        """Return the ranks that failed. To die without a reason after all work, while Python shuts down, is no failure.

        If a rank failed, also return the running ranks that have recorded a reason, because it may be the cause.
        """
        ended = [exit_ for exit_ in self._exits() if exit_.code != 0 and (exit_.kind or not self._was_done(exit_.rank))]
        if not ended:
            return []
        running = [rank for rank in self.ranks if self.processes.exit_code(rank) is None]
        return [*ended, *(Exit(rank=rank, code=1, **reason) for rank in running if (reason := self._reason(rank)))]

    def gone(self) -> Collection[int]:
        """Return the ranks whose processes have ended while the attempt continues."""
        return ()

    def heal(self) -> Iterator[Event]:
        """Replace what has died while the attempt continues, and yield events. These ranks end with the first that dies."""
        yield from ()

    def find_rejoined(self) -> Sequence[Rejoined]:
        """Return the replaced ranks that take part again since the last call."""
        return ()

    def report(self, leader: Message) -> Message:
        """Note the leader's message, on another node, and return what its ranks need to know in addition to `report_of`."""
        return {}

    def outlives_hang(self, hung: Exit) -> bool:
        """Kill a hung rank and return True if the attempt continues without it."""
        return False

    def suppressed_errors(self) -> list[Exit]:
        """Return the ranks that ended well although they recorded a failure, because the script suppressed the exception."""
        return [exit_ for exit_ in self._exits() if exit_.code == 0 and exit_.kind]

    def all_exited(self) -> bool:
        """Return True if no rank is running."""
        return all(self.processes.exit_code(rank) is not None for rank in self.ranks)

    @property
    def has_notice(self) -> bool:
        """True if a rank received a termination notice, from any source."""
        return any(notice_file(self.folder, rank).exists() for rank in self.ranks)

    def log_end(self, rank: int) -> dict[str, str]:
        """Return the path of a rank's log, and its last lines.

        A rank that ended before it had a log may have written into that of its fork server.
        """
        path, start, raw = log_file(self.folder, rank), 0, b""
        if self._server_log is not None and self.processes.exit_code(rank) is not None and not path.exists():
            path, start = self._server_log, self._server_log_start
        with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:  # the rank may never have started
            stream.seek(max(start, stream.seek(0, os.SEEK_END) - _TAIL_BYTES))
            raw = stream.read(_TAIL_BYTES)
        tail = "\n".join(raw.decode(errors="replace").splitlines()[-_TAIL_LINES:])
        return {"log": str(path), "log_tail": mask_secrets(tail)}

    def request_stop(self) -> None:
        """Send SIGTERM: each rank takes a checkpoint at the next step boundary and exits. A file has the same request."""
        self.processes.signal(signal.SIGTERM)
        with contextlib.suppress(OSError):  # the disk may be full
            for rank in self.ranks:
                stop_file(self.folder, rank).touch()

    def request_checkpoint(self) -> bool:
        """Ask all ranks of the attempt to exit after a checkpoint, without a deadline. Return True if that was written."""
        with contextlib.suppress(OSError):  # the disk may be full for a moment
            room_file(self.folder).touch()
            return True
        return False

    def end(self) -> None:
        """Kill the process groups of all ranks, and wait until they are gone. Raise `TrainingFailed` if the kernel keeps one."""
        self.processes.signal(signal.SIGKILL)
        running = self.processes.wait_until_gone(KILLED_WITHIN_S)
        self._logs.close()
        if running:
            raise TrainingFailed(
                f"expected killed ranks to be gone within {KILLED_WITHIN_S:.0f} s, found process {running!r} (by rank): look "
                "for a device or a network file system that does not answer, and recover the run on another node"
            )

    def _exits(self) -> list[Exit]:
        codes = {rank: self.processes.exit_code(rank) for rank in self.ranks}
        return [Exit(rank=rank, code=code, **self._reason(rank)) for rank, code in codes.items() if code is not None]

    def _reason(self, rank: int) -> Reason:
        """Return the reason that the rank recorded, or the reason why it never started. Empty if none is complete."""
        with contextlib.suppress(FileNotFoundError, ValueError):
            reason: Reason = json.loads(reason_file(self.folder, rank).read_bytes())
            return reason
        return self.processes.reason(rank)

    def _was_done(self, rank: int) -> bool:
        heartbeat = read_heartbeat(self.folder, rank)
        return heartbeat is not None and heartbeat.phase == Phase.DONE
