"""Launch of replica groups without a supervisor: another launcher starts each group, such as a torchrun for each.

The first group that finds no other one claims the run. Groups with the state of the run share the run's lock, so it shows
whether any is left. A group that finds it shared joins their attempt. Groups do for each other the work of a supervisor.
"""

import json
import logging
import os
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path

import psutil

from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint, resume_point_of
from dlac_pipeline.elastic.ranks.communicator import Communicator
from dlac_pipeline.elastic.ranks.this_process import this_process, was_restarted
from dlac_pipeline.extensions.replicas.group import GroupLaunch
from dlac_pipeline.extensions.replicas.group_locks import GroupLocks
from dlac_pipeline.extensions.replicas.own_rejoin import OwnRejoin
from dlac_pipeline.extensions.replicas.rank import has_held, mark_dead
from dlac_pipeline.extensions.replicas.shared_lighthouse import LighthouseWatch
from dlac_pipeline.lakehouse.errors import Preempted, RunFinished, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.ledger.older_ledger import LedgerWatch
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.heartbeat import Phase, read_heartbeat
from dlac_pipeline.supervise.ranks.launch_folders import write_resume_point, write_spec
from dlac_pipeline.supervise.ranks.rank_events import EVENTS_FILE, EventWriter, read_ending
from dlac_pipeline.train.startup import (
    await_resume_point,
    claim_now,
    decide_on_first,
    make_own_folder,
    spec_of,
)

_log = logging.getLogger(__name__)
_HAS_TRAINED = "met"
"""File in a launch folder, once its groups form quorums."""
_STOPS = "stops"
"""File in a launch folder, once its groups were asked to stop."""


class OwnLaunch(GroupLaunch):
    """A launch without a supervisor, as one of its groups takes part in it. Only the first rank of the group has locks."""

    def __init__(
        self, plans: Plans, spec: JobSpec, communicator: Communicator, *, takeover: bool, held: ExitStack
    ) -> None:
        """Claim the run, or join the groups that train it. Collective over the group. `held` keeps the locks.

        Raises:
            RunBusy: another launch trains the run, or another process has the number of this group.
            SpecInvalid: the groups that train have another job spec.
            TrainingFailed: the script of this group has failed after the end of the run.
            SystemExit: torchrun has started this group again, and its peers have ended the run. The exit status is 0.
            DlacError: as `start_attempt`.
        """
        process = this_process()
        assert process.group is not None, "take_own_group has named it"
        self._spec, self._group, self._first_rank = spec, process.group, process.group * process.world_size
        self._launcher = 0 if process.local_rank is None else os.getppid()
        self._has_met = False
        self._locks = GroupLocks(spec, self._group, held)
        decided = json.loads(decide_on_first(communicator, spec, partial(self._decide, plans, takeover=takeover)))
        if not decided:
            _log.warning("group %d has nothing to do: the other groups have ended run %r", self._group, spec.run)
            sys.exit(0)
        super().__init__(Path(decided["folder"]), rejoins=decided["rejoins"])
        self.claimed: bool = decided["claimed"]
        """True if this group has claimed the run."""
        self.point = resume_point_of(decided["point"])
        self.events = EventWriter(self.folder, communicator.rank)
        """Events that any group writes, whether or not it takes the checkpoints."""
        self.rejoin = self._find_dead() if decided["replaces"] else None
        """The record of its return, if it takes the place of a dead process."""
        if communicator.rank == 0:
            held.callback(LedgerWatch(plans.lakehouse).close)
            held.callback(LighthouseWatch(spec, self.folder, also=self._look).close)
            held.callback(self._close_rejoin)

    def met(self) -> None:
        """Note that this group has the state. Raise `TrainingFailed` if a new launch has begun, because its peers died."""
        if self._has_met:
            return
        if not self._locks.has_state:
            with self._locks.deciding():
                is_joined = self._locks.launch_folder == self.folder and self._locks.share()
            if not is_joined:
                raise TrainingFailed(
                    f"expected group {self._group} to train in attempt {self.point.attempt}, found that another launch has begun"
                )
        (self.folder / _HAS_TRAINED).touch()
        self._has_met = True

    def is_abandoned(self) -> bool:
        """Return True if no group of this launch is left that has the state."""
        with self._locks.deciding():
            return self._locks.launch_folder != self.folder or not self._locks.is_shared()

    def may_come(self, group: int) -> bool:
        """Return False if a group has not been started within `launch.last_call_s` after the claim."""
        waited_s = time.time() - (self.folder / "resume.json").stat().st_mtime
        if waited_s < self._spec.launch.last_call_s or has_held(self.folder, group):
            return True
        with self._locks.deciding():
            if has_held(self.folder, group):
                return True
            (self.folder / _HAS_TRAINED).touch()  # it needs the state of a peer if it comes later
        return False

    def note_stop(self) -> None:
        """Note that all groups stop. If they run out of time, torchrun may start some of them again."""
        (self.folder / _STOPS).touch()

    def _decide(self, plans: Plans, *, takeover: bool) -> str:
        """Return as JSON what all ranks of the group need to know. Empty: the run has ended while this group was away."""
        with self._locks.deciding():
            if not self._locks.take(takeover=takeover):
                return self._join()
            if was_restarted() and self._has_ended():
                return "{}"
            try:
                point = claim_now(plans, self._spec, from_memory=False, has_folder=True)
            except RunFinished:
                if was_restarted():
                    return "{}"
                raise
            return self._begin(point)

    def _has_ended(self) -> bool:
        """Return True if the groups have ended a launch since this torchrun began. Raise `TrainingFailed` if this one had."""
        with suppress(FileNotFoundError, psutil.Error):
            folder = self._locks.launch_folder
            begun_at = psutil.Process(self._launcher).create_time()
            signs = [folder / EVENTS_FILE] if read_ending(folder) else []
            signs += [folder / _STOPS] if (folder / _STOPS).exists() else []
            if not has_held(folder, self._group) or not any(each.stat().st_mtime > begun_at for each in signs):
                return False
            last = read_heartbeat(folder, self._first_rank)
            if last is not None and last.phase == Phase.DONE:
                raise TrainingFailed(
                    f"expected the script of group {self._group} to end with the run, found that it failed after that: see its "
                    "output"
                )
            return True
        return False

    def _begin(self, point: ResumePoint) -> str:
        """Let other groups join the attempt from now on."""
        folder = make_own_folder(self._spec, point.nonce, forgets=True)
        write_resume_point(folder, point.to_json())
        write_spec(folder, self._spec)
        self._locks.begin(folder)
        return _facts(folder, point, claimed=True)

    def _join(self) -> str:
        """Join the groups that train. If they have taken a step without this one, it has no part in the run's lock yet."""
        folder = self._locks.launch_folder
        if spec_of(folder) != self._spec:
            raise SpecInvalid(
                f"expected the job spec of the groups that train run {self._spec.run!r}, which {folder} has, found another one: "
                "give it to this group too, or stop the others first"
            )
        replaces = self._locks.hold(folder)
        rejoins = replaces or (folder / _HAS_TRAINED).exists()
        if rejoins:
            mark_dead(folder, self._group)
            self._locks.leave()
        return _facts(folder, await_resume_point(folder), rejoins=rejoins, replaces=replaces)

    def _find_dead(self) -> OwnRejoin | None:
        last = read_heartbeat(self.folder, self._first_rank)
        return None if last is None else OwnRejoin(self._spec, self.point.nonce, group=self._group, last=last)

    def _close_rejoin(self) -> None:
        if self.rejoin is not None:
            self.rejoin.close()

    def _look(self) -> None:
        """End this process if its torchrun has died. Keep a living process in the run's lock."""
        if self._launcher and os.getppid() != self._launcher:
            os._exit(Preempted.exit_code)
        self._locks.name_holder()


def _facts(
    folder: Path, point: ResumePoint, *, claimed: bool = False, rejoins: bool = False, replaces: bool = False
) -> str:
    facts = {"folder": str(folder), "claimed": claimed, "rejoins": rejoins, "replaces": replaces}
    return json.dumps({**facts, "point": json.loads(point.to_json())})
