"""Hangs and deaths: the rank that caused the failure of an attempt. In: signs of life. Out: an `Exit`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from typing import Protocol

from dlac_pipeline.elastic.ranks.processes import HANG
from dlac_pipeline.elastic.ranks.watched_time import watched_time
from dlac_pipeline.lakehouse import errors
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat
from dlac_pipeline.supervise.ranks.all_ranks import LOST
from dlac_pipeline.supervise.ranks.local_ranks import Exit

STUCK = "Stuck"
"""Kind of the failure of a rank that was asked to exit and is still running."""


_Mark = tuple[float, int, Phase] | None
"""The part of a record that changes with each sign of life. The loss is not in it, because NaN differs from itself."""


class Watched(Protocol):
    """Ranks that give signs of life."""

    def progress(self) -> list[RankHeartbeat | None]:
        """Return the last sign of life of each rank."""


class HangDetector:
    """Detector of hung ranks: how long each rank of an attempt has given no sign of life, from the first look on.

    A sign of life is a record that has changed since the last look. Silence is measured with a clock that stops while this
    process is suspended: wall clocks may be set on any node, and a supervisor may be suspended with its ranks.
    """

    def __init__(self, launch: LaunchSpec, clock: Callable[[], float] | None = None) -> None:
        self._launch = launch
        self._clock = clock or watched_time()
        self._heard: dict[int, tuple[_Mark, float]] = {}

    def too_long(self, ranks: Watched) -> Exit | None:
        """Return the rank that has been silent for the longest time, if that is too long.

        While one rank starts or loads, the others may wait for it, so all ranks get the longer timeout. A rank that has done
        its last step gives no more signs of life, because the script may then evaluate or export for any length of time.
        """
        found = ranks.progress()
        now = self._clock()
        self._look(found, now)
        signs = {rank: sign for rank, sign in enumerate(found) if sign is None or sign.phase != Phase.DONE}
        if not signs:
            return None
        launch = self._launch
        starting = any(sign is None or sign.phase < Phase.TRAINING for sign in signs.values())
        timeout_s = max(launch.hang_timeout_s, launch.start_timeout_s) if starting else launch.hang_timeout_s
        seen = {rank: (self._heard[rank][1], 0.0 if sign is None else sign.at) for rank, sign in signs.items()}
        rank = min(seen, key=seen.__getitem__)
        silent_s = now - seen[rank][0]
        if silent_s <= timeout_s:
            return None
        last = signs[rank]
        doing = Phase.STARTING.name.lower() if last is None else last.doing
        return Exit(rank=rank, code=1, kind=HANG, message=f"no sign of life for {silent_s:.0f} s, last while {doing}")

    def _look(self, found: Sequence[RankHeartbeat | None], now: float) -> None:
        for rank, sign in enumerate(found):
            mark = None if sign is None else (sign.at, sign.step, sign.phase)
            if rank not in self._heard or self._heard[rank][0] != mark:
                self._heard[rank] = (mark, now)


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
        if errors.error_class(failure.kind) is not None:
            return failure
        if failure.origin == "script" and failure.code >= 0 and not hard:
            return failure
    return (killed or failures)[0]


def stuck_rank(ranks: Watched, asked_s: float) -> Exit:
    """Return the rank with the fewest steps. All ranks were asked to exit `asked_s` seconds ago."""
    steps = {rank: -1 if sign is None else sign.step for rank, sign in enumerate(ranks.progress())}
    return Exit(
        rank=min(steps, key=steps.__getitem__),
        code=1,
        kind=STUCK,
        message=f"still running {asked_s:.0f} s after it was asked to leave",
    )
