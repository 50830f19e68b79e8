"""Stragglers: ranks that are slower than the others, and their slow phase, from own times (docs/recovery/detect.md)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from dlac_pipeline.supervise.liveness.heartbeat import RankHeartbeat
from dlac_pipeline.supervise.ranks.rank_events import Event

_PER_STEP = {"reading": "reading_us", "computing": "computing_us"}
_EACH_TIME = {"checkpoint": "checkpoint_us", "loading": "loading_us"}
_FACTOR = 2.0
"""A straggler takes more than this many times the median of the other ranks. Reports stop nothing, so the rule is a constant."""
_LEAST_S = 1.0
"""Seconds (per step) that a straggler takes longer at least. Less is noise of short steps."""
_STEPS = 5
"""Steps in a row over which reading and computing are compared."""
_ALIKE = 2
"""Parts of checkpoints are compared with parts that have at least their size divided by this number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A slow rank. Seconds are per step in reading and computing, otherwise of the whole phase."""

    rank: int
    phase: str
    step: int
    own_s: float
    median_s: float
    """Median of all further ranks."""

    def event(self) -> Event:
        """Return the event for listeners."""
        factor = round(self.own_s / self.median_s, 2) if self.median_s > 0 else None
        per = " per step" if self.phase in _PER_STEP else ""
        own, others = f"{self.own_s:.2f} s{per}", f"{self.median_s:.2f} s"
        message = f"rank {self.rank} is slow in {self.phase}: {own}, the others' median is {others}"
        times = {"own_s": round(self.own_s, 3), "median_s": round(self.median_s, 3), "factor": factor}
        return {"event": "straggler", **asdict(self), **times, "message": message}


class Stragglers:
    """Stragglers of one attempt. A slow rank is reported once, until it is as fast as the rest again."""

    def __init__(self) -> None:
        self._window: Sequence[RankHeartbeat] | None = None
        self._seen: dict[str, Sequence[int]] = {}
        self._reported: set[tuple[int, str]] = set()

    def observe(self, heartbeats: Sequence[RankHeartbeat]) -> list[Straggler]:
        """Return the ranks that are slow now and were not reported yet, from these heartbeats by rank."""
        if len(heartbeats) < 2:
            return []
        return [*self._by_steps(heartbeats), *self._each_time(heartbeats)]

    def _by_steps(self, heartbeats: Sequence[RankHeartbeat]) -> list[Straggler]:
        """Return the slow ranks by seconds per step, once all ranks have done enough steps since the last comparison."""
        before = self._window
        if before is None:
            self._window = heartbeats
            return []
        pairs = list(zip(heartbeats, before, strict=True))
        steps = [now.step - then.step for now, then in pairs]
        if any(now.spent.computing_us < then.spent.computing_us for now, then in pairs):  # a process was replaced
            self._window = heartbeats
            return []
        if min(steps) < _STEPS:
            return []
        self._window = heartbeats
        found = []
        for phase, name in _PER_STEP.items():
            took_us = [getattr(now.spent, name) - getattr(then.spent, name) for now, then in pairs]
            own_s = {rank: us / 1e6 / step for rank, (us, step) in enumerate(zip(took_us, steps, strict=True))}
            found += self._slow(phase, own_s, heartbeats)
        return found

    def _each_time(self, heartbeats: Sequence[RankHeartbeat]) -> list[Straggler]:
        """Return the slow ranks of each phase that all ranks have gone through once more."""
        found = []
        for phase, name in _EACH_TIME.items():
            now = [getattr(each.spent, name) for each in heartbeats]
            before = self._seen.get(phase, [0] * len(now))
            before = [there if there <= here else 0 for here, there in zip(now, before, strict=True)]
            if all(here > there for here, there in zip(now, before, strict=True)):
                self._seen[phase] = now
                own_s = {rank: (here - before[rank]) / 1e6 for rank, here in enumerate(now)}
                sizes = [each.spent.checkpoint_bytes if phase == "checkpoint" else 0 for each in heartbeats]
                found += self._slow(phase, own_s, heartbeats, sizes)
        return found

    def _slow(
        self, phase: str, own_s: Mapping[int, float], heartbeats: Sequence[RankHeartbeat], sizes: Sequence[int] = ()
    ) -> list[Straggler]:
        """Return the ranks that are slower than the rest. With `sizes`, only ranks with as much work are compared."""
        found = []
        for rank, mine in own_s.items():
            similar = [each for each in own_s if not sizes or sizes[each] * _ALIKE >= sizes[rank]]
            peers = [own_s[each] for each in similar if each != rank]
            others = median(peers) if peers else mine
            slow = mine > _FACTOR * others and mine - others >= _LEAST_S
            if slow and (rank, phase) not in self._reported:
                step = heartbeats[rank].step
                found.append(Straggler(rank=rank, phase=phase, step=step, own_s=mine, median_s=others))
            (self._reported.add if slow else self._reported.discard)((rank, phase))
        return found


class StragglerReports:
    """Observer of heartbeats that reports stragglers."""

    def __init__(self) -> None:
        self._stragglers = Stragglers()

    def observe(self, heartbeats: Sequence[RankHeartbeat]) -> list[Event]:
        """Return an event for each rank that is slow now and was not reported yet."""
        return [straggler.event() for straggler in self._stragglers.observe(heartbeats)]
