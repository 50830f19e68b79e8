"""Failure detector of ranks that hang. In: their heartbeats. Out: an `Exit`."""

from collections.abc import Callable, Sequence

from dlac_pipeline.elastic.ranks.processes import HANG
from dlac_pipeline.elastic.ranks.watched_time import watched_time
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat
from dlac_pipeline.supervise.ranks.local_ranks import Exit

_Mark = tuple[float, int, Phase] | None
"""The part of a record that changes with each heartbeat. The loss is not in it, because NaN differs from itself."""


class HangDetector:
    """Detector of hung ranks: how long each rank of an attempt has sent no heartbeat, from the first call on.

    A heartbeat is a record that has changed since the last call. Silence is measured with a clock that stops while this
    process is suspended: wall clocks may be set on any node, and a supervisor may be suspended with its ranks.
    """

    def __init__(self, launch: LaunchSpec, clock: Callable[[], float] | None = None) -> None:
        self._launch = launch
        self._clock = clock or watched_time()
        self._changed: dict[int, tuple[_Mark, float]] = {}

    def find_hang(self, heartbeats: Sequence[RankHeartbeat | None]) -> Exit | None:
        """Return the rank that has been silent for the longest time, if that is too long.

        While one rank starts or loads, the others may wait for it, so all ranks get the longer timeout. A rank that has done
        its last step sends no more heartbeats, because the script may then evaluate or export for any length of time.
        """
        now = self._clock()
        for rank, each in enumerate(heartbeats):
            mark = None if each is None else (each.at, each.step, each.phase)
            if rank not in self._changed or self._changed[rank][0] != mark:
                self._changed[rank] = (mark, now)
        last = {rank: each for rank, each in enumerate(heartbeats) if each is None or each.phase != Phase.DONE}
        if not last:
            return None
        launch = self._launch
        starting = any(each is None or each.phase < Phase.TRAINING for each in last.values())
        timeout_s = max(launch.hang_timeout_s, launch.start_timeout_s) if starting else launch.hang_timeout_s
        seen = {rank: (self._changed[rank][1], 0.0 if each is None else each.at) for rank, each in last.items()}
        rank = min(seen, key=seen.__getitem__)
        silent_s = now - seen[rank][0]
        if silent_s <= timeout_s:
            return None
        hung = last[rank]
        doing = Phase.STARTING.name.lower() if hung is None else hung.doing
        return Exit(rank=rank, code=1, kind=HANG, message=f"no heartbeat for {silent_s:.0f} s, last while {doing}")
