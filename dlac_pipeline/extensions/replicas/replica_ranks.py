"""Ranks of an attempt in replica groups: a dead group is started again, as long as another one has the state of the run."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from dlac_pipeline.elastic.ranks.launch_folder import reason_file
from dlac_pipeline.elastic.ranks.processes import Processes, RankProcesses
from dlac_pipeline.extensions.replicas.lighthouse import Lighthouse
from dlac_pipeline.extensions.replicas.rank import (
    DEAD,
    groups_of,
    mark_dead,
    read_lighthouse,
    read_presence,
    write_presence,
)
from dlac_pipeline.lakehouse.errors import DlacError, TrainingFailed, error_class
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase, read_heartbeat
from dlac_pipeline.supervise.ranks.local_ranks import Exit, RankGroup, Rejoined

if TYPE_CHECKING:
    from pathlib import Path

    from dlac_pipeline.supervise.ranks.rank_events import Event

_MOST_TRIES = 3
"""Times in a row that the lighthouse may fail to start."""
_PASSING = ("peer", "passing")
"""Origins of exceptions that a group which replaces the dead one may not raise again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """A dead replica group, whose new processes have not finished a step yet."""

    group: int
    exit: Exit
    """End of the rank to blame."""
    deaths: int
    """How many times the group died without a finished step in between, this time included."""
    noticed_at: float
    """In seconds since the epoch."""
    rejoined: Callable[..., Rejoined]
    """Returns the record of its return, with the heartbeat after a finished step."""


class ReplicaRanks(RankGroup):
    """The replica groups of one attempt on this node. `heal` starts the dead ones again."""

    def __init__(
        self,
        folder: Path,
        processes: RankProcesses,
        launch: LaunchSpec,
        lighthouse: Lighthouse | None,
        *,
        restart: Callable[[int], Processes],
        newcomers: Collection[int] = (),
        server_log: Path | None = None,
    ) -> None:
        """`restart` starts the processes of a group again. `newcomers` are groups that begin without the state.

        Without a `lighthouse` it is on another node.
        """
        super().__init__(folder, processes, server_log=server_log)
        self.lighthouse, self.launch = lighthouse, launch
        self._restart, self._size = restart, launch.ranks_per_replica
        self.groups = groups_of(self.ranks.start, len(self.ranks), self._size)
        """Groups of this node."""
        self._newcomers, self._elsewhere = {*newcomers}, dict[str, str]()
        """Groups of this node that have not got the state yet, and the presence of those on other nodes."""
        self._others_have_state = self._others_have_ended = False
        self.lost_ranks: Collection[int] = ()
        self.exchange: Callable[[], Iterator[Event]] = lambda: iter(())
        """Exchanges news with other nodes before each look, and yields events."""
        self._replacements: dict[int, Replacement] = {}
        """Group -> its last replacement."""
        self._dying: dict[int, Exit] = {}
        """Groups whose remaining ranks were killed, with the rank to blame."""
        self._places: list[str] = []
        """Places of the exceptions that ended groups."""
        self._stops = False
        self._lighthouse_failures: list[str] = []
        """Errors of starting the lighthouse, in a row."""

    def failures(self) -> list[Exit]:
        """Return the failed ranks if the attempt cannot continue without their groups.

        Once a group has ended, the run needs no other one. The script's work after its last step may still fail.
        """
        failed = super().failures()
        if self.has_ended():
            return [each for each in failed if each.origin == "script" and self._was_done(each.rank)]
        if len(self._lighthouse_failures) >= _MOST_TRIES:
            return [Exit(rank=0, code=1, kind=TrainingFailed.__name__, message=self._lighthouse_failures[-1])]
        blamed = self._blamed(failed)
        if self._outlives(blamed):
            return []
        return list(blamed.values()) or [each.exit for each in self._replacements.values()]

    def gone(self) -> Collection[int]:
        """Return the ranks of dead groups and of lost nodes, and ranks that have exited."""
        return {*self.lost_ranks, *(rank for rank in self.ranks if self.processes.exit_code(rank) is not None)}

    def outlives_hang(self, hung: Exit) -> bool:
        """Kill the group of a hung rank if another one has the state. It is a dead group from now on."""
        group = hung.rank // self._size
        if group not in self.groups:  # on another node
            return True
        if not self.has_ended() and (self._stops or not self._outlives({group: hung})):
            return False
        self._dying[group] = hung
        for rank in self._ranks_of(group):
            self.processes.kill(rank)
        return True

    def request_stop(self) -> None:
        """Send SIGTERM. A group that dies from now on is not started again."""
        self._stops = True
        super().request_stop()

    def end(self) -> None:
        """Kill all ranks and the lighthouse. Raises as `RankGroup.end`."""
        try:
            super().end()
        finally:
            if self.lighthouse is not None:
                self.lighthouse.end()

    def heal(self) -> Iterator[Event]:
        """Start dead groups again, and their lighthouse. Yield events."""
        yield from self.exchange()
        if died := self.restart_lighthouse():
            yield {
                "event": "warning",
                "message": f"the lighthouse of the replica groups was started again, after {died}",
            }
        for dead in self.replace_dead():
            last = read_heartbeat(self.folder, dead.exit.rank)
            facts = {"cause": str(dead.exit), "step": 0 if last is None else last.step, **self.log_end(dead.exit.rank)}
            yield {"event": "group_died", "group": dead.group, **facts}

    def restart_lighthouse(self) -> str:
        """Start a dead lighthouse again, and return how it died, or why an earlier start failed once it runs. Empty: no news."""
        if self.lighthouse is None:
            return ""
        try:
            died = self.lighthouse.restart_dead()
        except (OSError, DlacError) as err:
            self._lighthouse_failures.append(str(err))
            return ""
        if not died and self._lighthouse_failures and self.lighthouse.has_started:
            died = self._lighthouse_failures[-1]
        if died:
            self._lighthouse_failures = []
        return died

    def replace_dead(self) -> list[Replacement]:
        """Kill the rest of dead groups, and start groups again that have no process left. Return the latter.

        No group is started again at the end of the run, or if the attempt fails.
        """
        dead = self._blamed([each for each in super().failures() if self.processes.exit_code(each.rank) is not None])
        if not dead or not self._outlives(dead):
            return []
        replaced, ends = [], self.ends()
        for group, exit_ in dead.items():
            self._dying[group] = exit_
            running = [rank for rank in self._ranks_of(group) if self.processes.exit_code(rank) is None]
            for rank in running:
                self.processes.kill(rank)
            if not running:
                mark_dead(self.folder, group)
            if not running and not ends:
                replaced.append(self._replace(group, self._dying.pop(group)))
        return replaced

    def _replace(self, group: int, exit_: Exit) -> Replacement:
        if exit_.origin not in _PASSING:
            self._places.append(exit_.place)
        self._note_replaced(group, exit_)
        try:
            self._start_again(group)
        except (OSError, DlacError) as err:  # it is a dead group again
            self._dying[group] = Exit(rank=exit_.rank, code=1, kind=type(err).__name__, message=str(err))
        return self._replacements[group]

    def _note_replaced(self, group: int, exit_: Exit) -> None:
        last, before = read_heartbeat(self.folder, exit_.rank), self._replacements.get(group)
        noticed_at = time.time()
        rejoined = partial(
            Rejoined,
            event={"event": "group_rejoined", "group": group},
            cause=f"group {group}: {exit_}, while {'starting' if last is None else last.doing}",
            noticed_by="supervisor",
            failed_at=self.started_at if last is None else last.at,
            noticed_at=noticed_at,
            had_batch=last is not None and last.spent.in_hand > 0,
        )
        deaths = 1 if before is None else before.deaths + 1
        self._replacements[group] = Replacement(
            group=group, exit=exit_, deaths=deaths, noticed_at=noticed_at, rejoined=rejoined
        )

    def _start_again(self, group: int) -> None:
        for rank in self._ranks_of(group):
            reason_file(self.folder, rank).unlink(missing_ok=True)
            last = read_heartbeat(self.folder, rank)
            if last is not None:  # that of the dead process would be too old for one that starts
                self.rows_of_dead += last.spent.rows
                with closing(HeartbeatFile(self.folder, rank)) as file:
                    file.write(last.step, Phase.STARTING)
        self.processes.start_again(partial(self._restart, group))

    def find_rejoined(self) -> list[Rejoined]:
        """Return the groups whose new processes have finished a step since the last call."""
        found = []
        for group, replaced in list(self._replacements.items()):
            heartbeat = read_heartbeat(self.folder, group * self._size)
            if heartbeat is not None and heartbeat.at > replaced.noticed_at and heartbeat.spent.rows:
                del self._replacements[group]
                found.append(replaced.rejoined(heartbeat=heartbeat))
        return found

    def _with_state(self) -> list[int]:
        """Return the groups of this node that have the state, as far as their processes live."""
        self._newcomers = {each for each in self._newcomers if read_presence(self.folder, each) in ("", DEAD)}
        return [each for each in self.groups if each not in self._replacements and each not in self._newcomers]

    def has_state(self) -> bool:
        """Return True if a group of this node has the state."""
        failed = {each.rank // self._size for each in super().failures()}
        return any(group not in failed for group in self._with_state())

    def presence(self) -> dict[str, str]:
        """Return what the groups on other nodes need to know of each group: the lighthouse that it has reached, or its death."""
        lighthouse = read_lighthouse(self.folder)
        found = {str(group): read_presence(self.folder, group) for group in self.groups}
        if lighthouse is not None:
            found |= {str(group): lighthouse.address for group in self.groups if self._was_done(group * self._size)}
        return found

    def note_elsewhere(self, presence: Mapping[str, str], *, have_state: bool, have_ended: bool) -> None:
        """Note the presence of groups on other nodes, and whether any of them have the state or have ended."""
        self._others_have_state, self._others_have_ended = have_state, have_ended
        for group, found in presence.items():
            if self._elsewhere.get(group) != found and int(group) not in self.groups:
                write_presence(self.folder, int(group), found)
        self._elsewhere = dict(presence)

    def note_lost(self, group: int, lost: Exit) -> Event:
        """Note the loss of a group on another node, until its newcomer has finished a step. Return its event."""
        self._note_replaced(group, lost)
        last = read_heartbeat(self.folder, lost.rank)
        self.rows_of_dead += 0 if last is None else last.spent.rows
        return {"event": "group_died", "group": group, "cause": lost.message, "step": 0 if last is None else last.step}

    def _ranks_of(self, group: int) -> range:
        return range(group * self._size, (group + 1) * self._size)

    def _blamed(self, failed: Sequence[Exit]) -> dict[int, Exit]:
        """Return the failed groups, each with the rank to blame: the rest fail with it, or were killed."""
        groups: dict[int, list[Exit]] = {}
        for each in failed:
            groups.setdefault(each.rank // self._size, []).append(each)
        return {group: self._dying.get(group) or _first_cause(exits) for group, exits in groups.items()}

    def ends(self) -> bool:
        """Return True if no group is started again."""
        return self._stops or self.has_ended()

    def has_ended(self) -> bool:
        """Return True if a group is past the last step. Everything is committed, whatever its script does now."""
        return self._others_have_ended or any(
            self.processes.exit_code(rank) == 0 or self._was_done(rank) for rank in self.ranks
        )

    def _outlives(self, failed: Mapping[int, Exit]) -> bool:
        """Return True if the attempt continues without these groups: another one has the state, and they may do better."""
        has_holders = self._others_have_state or any(group not in failed for group in self._with_state())
        return has_holders and not any(self._is_final(group, exit_) for group, exit_ in failed.items())

    def _is_final(self, group: int, exit_: Exit) -> bool:
        """Return True if each group that replaces this one would fail as well."""
        before = self._replacements.get(group)
        if before is not None and before.deaths >= self.launch.attempts_without_progress:
            return True
        if before is None and error_class(exit_.kind) is not None:
            return True
        return bool(exit_.place) and exit_.place in self._places and exit_.origin not in _PASSING


def _first_cause(exits: Sequence[Exit]) -> Exit:
    """Return the end of a group's rank that explains the ends of all: a signal, or the first own exception."""
    killed = [each for each in exits if each.code < 0 and each.code != -signal.SIGABRT]
    return killed[0] if killed else min(exits, key=lambda each: (each.origin == "peer", each.at))
