"""Ranks of an attempt that are replica groups: a dead one is started again, as long as another one has the state of the run."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from dlac_pipeline.elastic.lighthouse import Lighthouse
from dlac_pipeline.elastic.ranks.processes import RankProcesses
from dlac_pipeline.lakehouse.errors import error_class
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.liveness.heartbeat import RankHeartbeat, read_heartbeat
from dlac_pipeline.supervise.ranks.local_ranks import Exit, RankGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """A dead replica group, whose new process has not finished a step yet. Moments are in seconds since the epoch."""

    exit: Exit
    doing: str
    """Phase of the dead process."""
    failed_at: float
    """Moment of its last heartbeat."""
    noticed_at: float
    deaths: int
    """How many processes of the group died one after the other without a finished step, this one included."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rejoined:
    """A replica group that takes part again."""

    replaced: Replacement
    heartbeat: RankHeartbeat
    """Heartbeat after a finished step of the new process."""


class ReplicaRanks(RankGroup):
    """The replica groups of one attempt. `replace_dead` starts the dead ones again."""

    def __init__(
        self,
        folder: Path,
        processes: RankProcesses,
        launch: LaunchSpec,
        lighthouse: Lighthouse,
        *,
        restart: Callable[[int], BaseProcess],
    ) -> None:
        """`restart` starts the process of a rank again."""
        super().__init__(folder, processes, log_mb=launch.log_mb)
        self.lighthouse = lighthouse
        self._restart = restart
        self._most_deaths = launch.attempts_without_progress
        self._replacements: dict[int, Replacement] = {}
        """By rank."""
        self._hung: dict[int, Exit] = {}
        """Hung ranks that were killed, by rank."""
        self._places: list[str] = []
        """Places of the exceptions that ended processes."""
        self._stops = False

    def failures(self) -> list[Exit]:
        """Return the failed ranks if the attempt cannot continue without them."""
        failed = super().failures()
        return [] if self._outlives(failed) else failed

    def outlives_hang(self, hung: Exit) -> bool:
        """Kill a hung group if another one has the state. It is a dead group from now on."""
        if self._stops or self._has_ended() or not self._outlives([hung]):
            return False
        self._hung[hung.rank] = hung
        self.processes.kill(hung.rank)
        return True

    def request_stop(self) -> None:
        """Send SIGTERM. A group that dies from now on is not started again."""
        self._stops = True
        super().request_stop()

    def end(self) -> None:
        """Kill all ranks and the lighthouse. Raises as `RankGroup.end`."""
        super().end()
        self.lighthouse.end()

    def replace_dead(self) -> list[Exit]:
        """Start dead groups again, and return their exits. Without effect at the end of the run, or if the attempt fails."""
        ended = [each for each in super().failures() if self.processes.exit_code(each.rank) is not None]
        dead = [self._hung.get(each.rank, each) for each in ended]
        if not dead or self._stops or self._has_ended() or not self._outlives(dead):
            return []
        for exit_ in dead:
            self._hung.pop(exit_.rank, None)
            last, before = read_heartbeat(self.folder, exit_.rank), self._replacements.get(exit_.rank)
            self._places.append(exit_.place)
            self._replacements[exit_.rank] = Replacement(
                exit=exit_,
                doing="starting" if last is None else last.doing,
                failed_at=self.started_at if last is None else last.at,
                noticed_at=time.time(),
                deaths=1 if before is None else before.deaths + 1,
            )
            self.processes.replace(exit_.rank, self._restart(exit_.rank))
        return dead

    def find_rejoined(self) -> list[Rejoined]:
        """Return the groups whose new processes have finished a step since the last call."""
        found = []
        for rank, replaced in list(self._replacements.items()):
            heartbeat = read_heartbeat(self.folder, rank)
            if heartbeat is not None and heartbeat.at > replaced.noticed_at and heartbeat.spent.rows:
                found.append(Rejoined(replaced=self._replacements.pop(rank), heartbeat=heartbeat))
        return found

    def _has_ended(self) -> bool:
        """Return True if a group has exited after the last step. It has committed everything."""
        return any(self.processes.exit_code(rank) == 0 for rank in self.ranks)

    def _outlives(self, failed: list[Exit]) -> bool:
        """Return True if the attempt continues without these ranks: another group has the state, and they may do better."""
        ended = {each.rank for each in failed}
        holders = [rank for rank in self.ranks if rank not in ended and rank not in self._replacements]
        return bool(holders) and not any(self._is_final(each) for each in failed)

    def _is_final(self, exit_: Exit) -> bool:
        """Return True if each process that replaces this one would fail as well."""
        before = self._replacements.get(exit_.rank)
        if before is not None and before.deaths >= self._most_deaths:
            return True
        if before is None and error_class(exit_.kind) is not None:
            return True
        return bool(exit_.place) and exit_.place in self._places
