"""Launch of replica groups without a supervisor: another launcher starts each group, such as a torchrun of its own.

The first group that finds no other one claims the run. Groups with the state of the run share the run's lock, so it shows
whether any is left. A group that finds it shared joins their attempt. What a supervisor does for groups, they do for each other.
"""

import fcntl
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil

from dlac_pipeline.checkpoint.store import storing
from dlac_pipeline.elastic.lighthouse import check_torchft
from dlac_pipeline.elastic.ranks.environment import defaults_of
from dlac_pipeline.elastic.ranks.replicas import (
    GROUP_VARIABLE,
    OWN_GROUP_VARIABLE,
    has_held,
    hold_group,
    lock_at_once,
    mark_dead,
)
from dlac_pipeline.elastic.shared_lighthouse import LighthouseWatch
from dlac_pipeline.lakehouse.durable_io import write_durably
from dlac_pipeline.lakehouse.errors import Preempted, RunBusy, RunFinished, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.older_ledger import LedgerWatch
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import OPERATOR
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.supervise.incident import recovery_of_group, rejoined_event
from dlac_pipeline.supervise.liveness.heartbeat import Phase, RankHeartbeat, read_heartbeat
from dlac_pipeline.supervise.liveness.run_lock import name_holder, run_lock, share_run_lock
from dlac_pipeline.supervise.ranks.rank_events import EventWriter, read_ending
from dlac_pipeline.supervise.ranks.replica_ranks import Rejoined
from dlac_pipeline.supervise.ranks.start_ranks import write_resume_point, write_spec
from dlac_pipeline.supervise.recovery_recorder import RecoveryRecorder
from dlac_pipeline.train.communicator import Communicator
from dlac_pipeline.train.own_reports import was_restarted
from dlac_pipeline.train.startup import (
    LAUNCHED_VARIABLE,
    await_resume_point,
    claim_now,
    decide_on_first,
    make_own_folder,
    spec_of,
)

_log = logging.getLogger(__name__)
_NAMES_LAUNCH = "launch-of-groups"
"""File in a run's folder with the name of the launch folder of its groups."""
_HAS_TRAINED = "met"
"""File in a launch folder, once its groups have formed a quorum."""


def take_own_group(spec: JobSpec) -> None:
    """Take the number of this process's replica group from the environment. Raise `SpecInvalid` if it or the launch has none."""
    launch, number = spec.launch, os.environ.get(OWN_GROUP_VARIABLE, "")
    if not number.isdecimal() or int(number) >= launch.replicas:
        raise SpecInvalid(
            f"expected {OWN_GROUP_VARIABLE} of 0 to {launch.replicas - 1} for a replica group that `dlac train` does not start, "
            f"found {number or 'none'!r}: start each group with a torchrun of its own, and with its number"
        )
    ranks, ranks_here = (os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not int(ranks) == int(ranks_here) == launch.ranks_per_replica:
        raise SpecInvalid(
            f"expected launch.ranks_per_replica = {launch.ranks_per_replica} ranks of group {number} on this node, found "
            f"{ranks} ranks, {ranks_here} of them here: give torchrun --nproc-per-node {launch.ranks_per_replica}"
        )
    if spec.listeners.chosen():
        raise SpecInvalid(
            "expected no listeners with replica groups that `dlac train` does not start, found some: leave out [listeners]"
        )
    check_torchft()
    os.environ[GROUP_VARIABLE] = number
    for name, value in defaults_of(spec).items():
        os.environ.setdefault(name, value)


class OwnLaunch:
    """A launch without a supervisor, as one of its groups takes part in it. Only the first rank of the group holds locks."""

    def __init__(
        self, plans: Plans, spec: JobSpec, communicator: Communicator, *, takeover: bool, held: ExitStack
    ) -> None:
        """Claim the run, or join the groups that train it. Collective over the group. `held` keeps the locks.

        Raises:
            RunBusy: another launch trains the run, or another process has the number of this group.
            SpecInvalid: the groups that train have another job spec.
            TrainingFailed: the script of this group has failed after the end of the run.
            SystemExit: torchrun has started this group again, and the others have ended the run. The exit status is 0.
            DlacError: as `claim_and_verify`.
        """
        self._spec, self._held = spec, held
        self._group, self._ranks = int(os.environ[GROUP_VARIABLE]), communicator.world_size
        self._run_folder = Path(spec.checkpoint.local) / spec.run
        self._launcher = os.getppid() if LAUNCHED_VARIABLE in os.environ else 0
        self._lock: int | None = None
        """Descriptor of the run's lock, once the group has the state."""
        self._shared: int | None = None
        """The same, if this group has not claimed the run."""
        self._has_met = False
        self._recorder: RecoveryRecorder | None = None
        held.callback(self._release)
        decide = partial(self._decide, plans, takeover=takeover)
        decided = json.loads(decide_on_first(communicator, spec, decide))
        if not decided:
            _log.warning("group %d has nothing to do: the other groups have ended run %r", self._group, spec.run)
            sys.exit(0)
        self.folder = self._run_folder / decided["launch"]
        """The launch folder."""
        self.claimed: bool = decided["claimed"]
        """True if this group has claimed the run."""
        self.rejoins: bool = decided["rejoins"]
        """True if it needs the state of a peer, because the others have trained without it."""
        self.point = ResumePoint(**decided["point"])
        self.events = EventWriter(self.folder, communicator.rank)
        """Events that are written whichever group takes the checkpoints."""
        self._last: RankHeartbeat | None = None
        """Last heartbeat of the dead process whose place this one takes."""
        if decided["replaces"]:
            self._last = read_heartbeat(self.folder, self._group * self._ranks)
        if communicator.rank == 0:
            held.callback(LedgerWatch(plans.lakehouse).close)
            held.callback(LighthouseWatch(spec, self.folder, also=self._look).close)

    def met(self) -> None:
        """Note that this group has the state. Raise `TrainingFailed` if a new launch has begun, because the others died."""
        if not self._has_met:
            (self.folder / _HAS_TRAINED).touch()
            self._has_met = True
        if self._lock is not None:
            return
        with self._deciding():
            if self._named() == self.folder:
                self._lock = self._shared = share_run_lock(self._spec.checkpoint.local, self._spec.run)
        if self._lock is None:
            raise TrainingFailed(
                f"expected group {self._group} to train in attempt {self.point.attempt}, found that another launch has begun"
            )

    def is_abandoned(self) -> bool:
        """Return True if no group of this launch is left that has the state."""
        with self._deciding(), suppress(RunBusy):
            if self._named() != self.folder:
                return True
            with self._alone():
                return True
        return False

    def may_come(self, group: int) -> bool:
        """Return False if a group has not been started within `launch.last_call_s` after the claim."""
        waited_s = time.time() - (self.folder / "resume.json").stat().st_mtime
        return has_held(self.folder, group) or waited_s < self._spec.launch.last_call_s

    def record_rejoined(self, lakehouse: Lakehouse, heartbeat: RankHeartbeat) -> None:
        """Have it recorded that this group takes part again, once it has finished a step."""
        if self._recorder is not None:
            self._recorder.publish_written()
        elif self._last is not None:
            self._recorder = RecoveryRecorder(lakehouse)
            self._held.callback(self._recorder.close)
            started, last = psutil.Process().create_time(), self._last
            rejoined = Rejoined(
                group=self._group,
                cause=f"group {self._group} died, while {last.doing}",
                noticed_by="torchrun" if was_restarted() else OPERATOR,
                failed_at=min(started, last.at),
                noticed_at=started,
                had_batch=last.spent.in_hand > 0,
                heartbeat=heartbeat,
            )
            build = partial(recovery_of_group, self._spec, self.point.nonce, rejoined)
            self._recorder.record(build, partial(rejoined_event, rejoined), self.events.write)

    def _decide(self, plans: Plans, *, takeover: bool) -> str:
        """Return as JSON what all ranks of the group need to know. Empty: the run has ended while this group was away."""
        with self._deciding():
            try:
                alone = self._held.enter_context(self._alone())
            except RunBusy:
                self._shared = share_run_lock(self._spec.checkpoint.local, self._spec.run)
                if self._shared is not None:
                    return self._join()
                if not takeover:
                    raise
                alone = self._held.enter_context(self._alone(takeover=True))
            if was_restarted() and self._has_ended():
                return "{}"
            try:
                point = claim_now(plans, self._spec, from_memory=False)
            except RunFinished:
                if was_restarted():
                    return "{}"
                raise
            return self._begin(point, alone)

    def _has_ended(self) -> bool:
        """Return True if the groups have ended their launch in order. Raise `TrainingFailed` if this group had, too."""
        with suppress(FileNotFoundError):
            folder = self._named()
            if not has_held(folder, self._group) or read_ending(folder) is None:
                return False
            last = read_heartbeat(folder, self._group * self._ranks)
            if last is not None and last.phase == Phase.DONE:
                raise TrainingFailed(
                    f"expected the script of group {self._group} to end with the run, found that it failed after that: see its "
                    "output"
                )
            return True
        return False

    def _begin(self, point: ResumePoint, lock: int) -> str:
        """Let other groups join the attempt from now on."""
        folder = make_own_folder(self._spec, point.nonce)
        assert folder is not None, "replica groups have one"
        write_resume_point(folder, point.to_json())
        with storing(folder):
            write_spec(folder, self._spec)
            self._held.callback(os.close, hold_group(folder, self._group))
            write_durably(self._run_folder / _NAMES_LAUNCH, folder.name.encode())
        self._lock = lock
        if not lock_at_once(lock, fcntl.LOCK_SH):
            raise RunBusy(f"expected no other launch of run {self._spec.run!r}, found one that began in this moment")
        return self._facts(folder, point, claimed=True)

    def _join(self) -> str:
        """Join the groups that train. If they have taken a step without this one, it shares the lock once it has their state."""
        folder = self._named()
        if spec_of(folder) != self._spec:
            raise SpecInvalid(
                f"expected the job spec of the groups that train run {self._spec.run!r}, which {folder} has, found another one: "
                "give it to this group too, or stop the others first"
            )
        replaces = has_held(folder, self._group)
        rejoins = replaces or (folder / _HAS_TRAINED).exists()
        self._held.callback(os.close, hold_group(folder, self._group))
        if rejoins:
            mark_dead(folder, self._group)
            self._release()
        self._lock = self._shared
        return self._facts(folder, await_resume_point(folder), rejoins=rejoins, replaces=replaces)

    def _facts(
        self, folder: Path, point: ResumePoint, *, claimed: bool = False, rejoins: bool = False, replaces: bool = False
    ) -> str:
        facts = {"launch": folder.name, "claimed": claimed, "rejoins": rejoins, "replaces": replaces}
        return json.dumps({**facts, "point": json.loads(point.to_json())})

    def _named(self) -> Path:
        """Return the launch folder of the groups that train."""
        return self._run_folder / (self._run_folder / _NAMES_LAUNCH).read_text()

    def _alone(self, *, takeover: bool = False) -> AbstractContextManager[int]:
        """Return the run's lock, for this process alone. Entering it raises `RunBusy` if other processes have it."""
        return run_lock(self._spec.checkpoint.local, self._spec.run, wait_s=0.0, takeover=takeover)

    def _release(self) -> None:
        """Give the shared lock back."""
        shared, self._shared, self._lock = self._shared, None, None
        if shared is not None:
            os.close(shared)

    def _look(self) -> None:
        """End this process if its torchrun has died. Keep a living process in the run's lock."""
        if self._launcher and os.getppid() != self._launcher:
            os._exit(Preempted.exit_code)
        if self._lock is not None:
            name_holder(self._lock)

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Let one group at a time look at the run's lock and change it. A claim in between may take its time."""
        with storing(self._run_folder):
            descriptor = os.open(self._run_folder / "groups.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)
