"""Failures: why an attempt ended without finishing, the rank that caused it, and the work that was lost."""

import re
import signal
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlac_pipeline.elastic.ranks.processes import HANG
from dlac_pipeline.elastic.ranks.watched_time import watched_time
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.lakehouse.ledger.run_rows import claim_of
from dlac_pipeline.lakehouse.ledger.typed_rows import LedgerRow
from dlac_pipeline.lakehouse.masking import mask_known
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.spec.mesh_spec import DATA_PARALLEL, MeshSpec
from dlac_pipeline.supervise.claims import left_in_order
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, read_heartbeats
from dlac_pipeline.supervise.ranks.all_ranks import LOST, AllRanks
from dlac_pipeline.supervise.ranks.local_ranks import Exit, RankError

STUCK = "Stuck"
"""Kind of the failure of a rank that was asked to exit and is still running."""
_NO_MEMORY = re.compile(r"can(no|')t allocate memory|not enough memory|out of memory", re.IGNORECASE)
STOPPED_FILE = "stopped"
"""File in the launch folder of an attempt that ended on request. One that trained nothing has no other record of that."""
SILENT_KINDS = (HANG, LOST)
"""Kinds of the failures of ranks that stopped to send heartbeats, alone or with their node."""
_Mark = tuple[float, int, Phase] | None
"""The part of a record that changes with each heartbeat. The loss is not in it, because NaN differs from itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure(RankError):
    """An attempt that ended without finishing, with the error of the rank that failed. Moments are in seconds since the epoch."""

    cause: str
    noticed_by: str
    failed_at: float
    """Moment of the last heartbeat before the failure."""
    noticed_at: float
    launched_at: float
    """Start of the launch that recovers. Without a sensor it is the moment of the notice."""
    stopped_at: float
    """Moment at which no process of the attempt was left."""
    last_step: int
    """Last optimizer step that the attempt finished."""
    began: float = 0.0
    """Moment at which the attempt began to train, or 0."""
    rows: int = 0
    """Rows of the attempt's finished steps."""
    in_hand: int = 0
    """Step of the batch that the failed rank had, or 0."""
    doing: str = ""
    """Phase of the failed rank."""
    rank: int = -1
    """The rank that failed, or -1 if it is unknown."""
    trained: bool = False
    """True if the failed rank had finished a step in this attempt."""
    log: str = ""
    """File of the failed rank's output, on its own node."""

    @property
    def script_raised(self) -> bool:
        """True if the script is to blame: it raised the exception, or passed values that DLAC could not compute with."""
        return bool(self.place) and (self.origin == "script" or (self.origin == "dlac" and self.in_hand > 0))

    @property
    def lost_memory(self) -> bool:
        """True if the attempt could not load the state in memory that its claim names."""
        return self.kind == errors.MemoryStateLost.__name__

    @property
    def lacked_memory(self) -> bool:
        """True if an exception was a failed allocation: of Python, NumPy, Arrow or PyTorch, on a node or a device."""
        return self.kind.endswith("MemoryError") or (bool(self.place) and bool(_NO_MEMORY.search(self.message)))

    @property
    def blames_script(self) -> bool:
        """True if a rank failed with an exception or an exit status, and did not only stop to send heartbeats."""
        return self.kind not in ("", *SILENT_KINDS)

    @property
    def summary(self) -> str:
        """The cause in one line, with its step and place."""
        if not self.where:
            return self.cause
        step = f"in step {self.in_hand}" if self.in_hand else f"while {self.doing} after step {self.last_step}"
        return f"{self.cause.partition(chr(10))[0]}, {step}, at {self.where}"

    def describe(self) -> str:
        """Return the summary, the user's frames of the traceback and the log file, a line each."""
        log = f"log of rank {self.rank}: {self.log}" if self.log else ""
        return mask_known("\n".join(part for part in (self.summary, self.traceback, log) if part))


def planned_end(cause: str, *, step: int, undone: Sequence[RankHeartbeat] = ()) -> Failure:
    """Return the failure that stands for the planned end of an attempt. `undone` is work of its ranks in no checkpoint."""
    now = time.time()
    return Failure(
        cause=cause,
        noticed_by="supervisor",
        failed_at=now,
        noticed_at=now,
        launched_at=now,
        stopped_at=now,
        last_step=step,
        began=min((found.spent.began for found in undone), default=0.0),
        rows=sum(found.spent.rows for found in undone),
    )


def failure_of_attempt(
    rows: list[LedgerRow], attempt: int, *, noticed_by: str, noticed_at: float, launched_at: float, stopped_at: float
) -> Failure | None:
    """Return the failure of an attempt whose supervisor is gone, from the launch folder that its claim names.

    Return None if the attempt did not train, or exited in order and is started again by an operator.
    """
    claim = claim_of(rows, attempt)
    found = read_heartbeats(Path(claim.launch_folder)) if claim.launch_folder else []
    has_ended = bool(found) and all(each.phase == Phase.DONE for each in found)  # as if it found no new rows
    was_stopped = bool(claim.launch_folder) and Path(claim.launch_folder, STOPPED_FILE).exists()
    in_order = left_in_order(rows, attempt) or was_stopped or has_ended
    if not claim.trains or (noticed_by == OPERATOR and in_order):
        return None
    appended = [row.committed_at.timestamp() for row in rows if row.attempt == attempt and row.seq]
    heartbeats_at = [*(progress.at for progress in found), *appended]
    return Failure(
        cause=f"attempt {attempt} ended without finishing",
        noticed_by=noticed_by,
        failed_at=min(noticed_at, max(heartbeats_at, default=noticed_at)),
        noticed_at=noticed_at,
        launched_at=launched_at,
        stopped_at=stopped_at,
        last_step=max((progress.step for progress in found), default=0),
        began=min((progress.spent.began for progress in found), default=0.0),
        rows=sum(progress.spent.rows for progress in found),
    )


def end_ranks(ranks: AllRanks, cause: Exit, *, step: int, resumed_step: int, mesh: MeshSpec) -> Failure:
    """Kill all ranks of this node and return the failure. `step` is the last one that all ranks are known to have finished."""
    noticed_at = time.time()
    heartbeats = ranks.heartbeats()
    known = [found for found in heartbeats if found is not None]
    mine = heartbeats[cause.rank]
    ranks.own.end()
    raised = cause.code >= 0  # a rank that a signal killed may have recorded an exception that its script caught
    return Failure(
        cause=str(cause),
        kind=cause.kind,
        message=cause.message,
        detail=cause.detail,
        noticed_by="supervisor",
        failed_at=ranks.own.started_at if mine is None else mine.at,
        noticed_at=noticed_at,
        launched_at=noticed_at,
        stopped_at=time.time(),
        last_step=max((found.step for found in known), default=step),
        began=min((found.spent.began for found in known), default=0.0),
        rows=rows_worked_on(heartbeats, silent=ranks.silent_ranks, mesh=mesh) + ranks.own.rows_of_dead,
        in_hand=0 if mine is None else max(0, mine.spent.in_hand),
        doing=Phase.STARTING.name.lower() if mine is None else mine.doing,
        rank=cause.rank,
        trained=mine is not None and mine.step > resumed_step,
        where=cause.where if raised else "",
        place=cause.place if raised else "",
        origin=cause.origin if raised else "",
        traceback=cause.traceback if raised else "",
        log=ranks.log_end(cause.rank).get("log", ""),
    )


def rows_worked_on(
    heartbeats: Sequence[RankHeartbeat | None], *, silent: Collection[int], mesh: MeshSpec = DATA_PARALLEL
) -> int:
    """Return the rows of finished steps. Of silent ranks, which took part in the steps of the others, at least their mean.

    The first rank of a share counts its rows.
    """
    rows = {
        rank: 0 if found is None else found.spent.rows
        for rank, found in enumerate(heartbeats)
        if mesh.speaks(rank, len(heartbeats))
    }
    others = [count for rank, count in rows.items() if rank not in silent]
    least = round(sum(others) / len(others)) if others else 0
    return sum(max(count, least) if rank in silent else count for rank, count in rows.items())


def first_cause(failures: list[Exit]) -> Exit:
    """Return the failure that explains the others.

    When one rank dies, the others fail with errors of their broken connections, and may exit before it. In order:

    - A lost node, because all its ranks fail with it.
    - The first error of DLAC or exception of the script. A signal precedes an exception of the script, except SIGABRT, with
      which NCCL ends ranks whose peer has died.
    - A signal.
    - The first of the others. Ranks whose connection to another rank broke come last.
    """
    failures = sorted(failures, key=lambda failure: (failure.kind != LOST, failure.origin == "peer", failure.at))
    if failures[0].kind == LOST:
        return failures[0]
    killed = [failure for failure in failures if failure.code < 0]
    hard = any(failure.code != -signal.SIGABRT for failure in killed)
    for failure in failures:
        if errors.error_class(failure.kind) is not None and failure.origin != "peer":
            return failure
        if failure.origin == "script" and failure.code >= 0 and not hard:
            return failure
    return (killed or failures)[0]


def stuck_rank(ranks: AllRanks, drained_s: float) -> Exit:
    """Return the failure of the rank with the fewest steps. All ranks were asked to exit `drained_s` seconds ago."""
    steps = {rank: -1 if each is None else each.step for rank, each in enumerate(ranks.heartbeats())}
    message = f"still running {drained_s:.0f} s after it was asked to leave"
    return Exit(rank=min(steps, key=steps.__getitem__), code=1, kind=STUCK, message=message)


def _is_in(phase: Phase, heartbeat: RankHeartbeat | None) -> bool:
    return heartbeat is not None and heartbeat.phase == phase


class HangDetector:
    """Detector of hung ranks: how long each rank of an attempt has sent no heartbeat, from the first call on.

    A heartbeat is a record that has changed since the last call. Silence is measured with a clock that stops while this
    process is suspended: wall clocks may be set on any node, and a supervisor may be suspended with its ranks.
    """

    def __init__(self, launch: LaunchSpec, clock: Callable[[], float] | None = None) -> None:
        self._launch = launch
        self._clock = clock or watched_time()
        self._changed: dict[int, tuple[_Mark, float]] = {}

    def find_hang(self, heartbeats: Sequence[RankHeartbeat | None], *, gone: Collection[int] = ()) -> Exit | None:
        """Return the rank that has been silent for the longest time, if that is too long. `gone` have no process any more.

        While one rank starts or loads, the others may wait for it, so all ranks get the longer timeout. A rank that has done
        its last step sends no more heartbeats, because the script may then evaluate or export for any length of time. A rank
        that waits for other process groups is not blamed, unless all ranks do.
        """
        now = self._clock()
        for rank, each in enumerate(heartbeats):
            mark = None if each is None else (each.at, each.step, each.phase)
            if rank not in self._changed or self._changed[rank][0] != mark:
                self._changed[rank] = (mark, now)
        last = {rank: each for rank, each in enumerate(heartbeats) if rank not in gone and not _is_in(Phase.DONE, each)}
        last = {rank: each for rank, each in last.items() if not _is_in(Phase.WAITING, each)} or last
        if not last:
            return None
        launch = self._launch
        starting = any(each is None or each.phase < Phase.TRAINING for each in last.values())
        timeout_s = launch.start_timeout_s if starting else launch.hang_timeout_s
        seen = {rank: (self._changed[rank][1], 0.0 if each is None else each.at) for rank, each in last.items()}
        rank = min(seen, key=seen.__getitem__)
        silent_s = now - seen[rank][0]
        if silent_s <= timeout_s:
            return None
        hung = last[rank]
        doing = Phase.STARTING.name.lower() if hung is None else hung.doing
        return Exit(rank=rank, code=1, kind=HANG, message=f"no heartbeat for {silent_s:.0f} s, last while {doing}")

    def forget(self) -> None:
        """Measure silence from the next call on. A hung rank was killed, and the others have waited for it."""
        self._changed = {}
