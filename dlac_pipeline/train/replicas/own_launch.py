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
from dlac_pipeline.lakehouse.errors import RunBusy, RunFinished, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.older_ledger import LedgerWatch
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.supervise.incident import recovery_of_group, rejoined_event
from dlac_pipeline.supervise.liveness.heartbeat import RankHeartbeat, read_heartbeat
from dlac_pipeline.supervise.liveness.run_lock import name_holder, run_lock, share_run_lock
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.supervise.ranks.replica_ranks import Rejoined
from dlac_pipeline.supervise.ranks.start_ranks import write_resume_point, write_spec
from dlac_pipeline.supervise.recovery_recorder import RecoveryRecorder
from dlac_pipeline.train.communicator import Communicator
from dlac_pipeline.train.own_reports import RESTARTS_VARIABLE
from dlac_pipeline.train.startup import await_resume_point, claim_now, decide_on_first, make_own_folder, spec_of

_log = logging.getLogger(__name__)
_POLL_S = 0.02
_NAMES_LAUNCH = "launch-of-groups"
"""File in a run's folder with the name of the launch folder of its groups."""


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
            SystemExit: torchrun has started this group again, and the others have finished the run. The exit status is 0.
            DlacError: as `claim_and_verify`.
        """
        self._spec, self._held = spec, held
        self._group = int(os.environ[GROUP_VARIABLE])
        self._run_folder = Path(spec.checkpoint.local) / spec.run
        self._lock: int | None = None
        """Descriptor of the run's lock, once the group has the state."""
        self._recorder: RecoveryRecorder | None = None
        decide = partial(self._decide, plans, takeover=takeover)
        decided = json.loads(decide_on_first(communicator, spec, decide))
        if not decided:
            _log.warning("group %d has nothing to do: the other groups have finished run %r", self._group, spec.run)
            sys.exit(0)
        self.folder = self._run_folder / decided["launch"]
        """The launch folder."""
        self.claimed: bool = decided["claimed"]
        """True if this group has claimed the run."""
        self.rejoins: bool = decided["rejoins"]
        """True if it takes the place of a dead group, and needs the state of a peer."""
        self.point = ResumePoint(**decided["point"])
        self._last = read_heartbeat(self.folder, self._group * communicator.world_size) if self.rejoins else None
        """Last heartbeat of the dead group's first rank."""
        if communicator.rank == 0:
            held.callback(LedgerWatch(plans.lakehouse).close)
            held.callback(LighthouseWatch(spec, self.folder, also=self._name_holder).close)

    def hold(self) -> None:
        """Note that this group has the state. Raise `TrainingFailed` if a new attempt has begun, because the others died."""
        if self._lock is not None:
            return
        with self._deciding():
            if self._named() == self.folder:
                self._lock = share_run_lock(self._spec.checkpoint.local, self._spec.run)
        if self._lock is None:
            raise TrainingFailed(
                f"expected group {self._group} to train in attempt {self.point.attempt}, found that another launch has begun"
            )
        self._held.callback(os.close, self._lock)

    def is_abandoned(self) -> bool:
        """Return True if no group is left that has the state."""
        with self._deciding(), suppress(RunBusy), self._alone():
            return True
        return False

    def record_rejoined(self, lakehouse: Lakehouse, heartbeat: RankHeartbeat, events: EventWriter) -> None:
        """Have it recorded that this group takes part again, once it has finished a step."""
        if self._recorder is not None:
            self._recorder.publish_written()
        elif self.rejoins:
            self._recorder = RecoveryRecorder(lakehouse)
            self._held.callback(self._recorder.close)
            started, last = psutil.Process().create_time(), self._last
            rejoined = Rejoined(
                group=self._group,
                cause=f"group {self._group} died, while {'starting' if last is None else last.doing}",
                noticed_by="torchrun",
                failed_at=started if last is None else min(started, last.at),
                noticed_at=started,
                had_batch=last is not None and last.spent.in_hand > 0,
                heartbeat=heartbeat,
            )
            build = partial(recovery_of_group, self._spec, self.point.nonce, rejoined)
            self._recorder.record(build, partial(rejoined_event, rejoined), events.write)

    def _decide(self, plans: Plans, *, takeover: bool) -> str:
        """Return as JSON what all ranks of the group need to know."""
        with self._deciding():
            try:
                alone = self._held.enter_context(self._alone())
            except RunBusy:
                shared = share_run_lock(self._spec.checkpoint.local, self._spec.run)
                if shared is not None:
                    return self._join(shared)
                if not takeover:
                    raise
                alone = self._held.enter_context(self._alone(takeover=True))
            return self._claim(plans, alone)

    def _claim(self, plans: Plans, lock: int) -> str:
        """Claim the run, and let other groups join from now on."""
        try:
            point = claim_now(plans, self._spec, from_memory=False)
        except RunFinished:
            if os.environ.get(RESTARTS_VARIABLE, "0") == "0":
                raise
            return "{}"
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
        return self._facts(folder, point, claimed=True, rejoins=False)

    def _join(self, lock: int) -> str:
        """Join the groups that train. One that was among them has lost its state, and shares the lock once it has a peer's."""
        folder = self._named()
        if spec_of(folder) != self._spec:
            os.close(lock)
            raise SpecInvalid(
                f"expected the job spec of the groups that train run {self._spec.run!r}, which {folder} has, found another one: "
                "give it to this group too, or stop the others first"
            )
        rejoins = has_held(folder, self._group)
        self._held.callback(os.close, hold_group(folder, self._group))
        if rejoins:
            mark_dead(folder, self._group)
            os.close(lock)
        else:
            self._lock = lock
            self._held.callback(os.close, lock)
        return self._facts(folder, await_resume_point(folder), claimed=False, rejoins=rejoins)

    def _facts(self, folder: Path, point: ResumePoint, *, claimed: bool, rejoins: bool) -> str:
        facts = {"launch": folder.name, "claimed": claimed, "rejoins": rejoins}
        return json.dumps({**facts, "point": json.loads(point.to_json())})

    def _named(self) -> Path:
        """Return the launch folder of the groups that train."""
        return self._run_folder / (self._run_folder / _NAMES_LAUNCH).read_text()

    def _alone(self, *, takeover: bool = False) -> AbstractContextManager[int]:
        """Return the run's lock, for this process alone. Entering it raises `RunBusy` if other processes have it."""
        return run_lock(self._spec.checkpoint.local, self._spec.run, wait_s=0.0, takeover=takeover)

    def _name_holder(self) -> None:
        if self._lock is not None:
            name_holder(self._lock)

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Let one group at a time look at the run's lock and change it."""
        limit_s = self._spec.launch.start_timeout_s
        with storing(self._run_folder):
            descriptor = os.open(self._run_folder / "groups.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            deadline = time.monotonic() + limit_s
            while not lock_at_once(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise RunBusy(
                        f"expected the group that claims run {self._spec.run!r} to be done within {limit_s:.0f} s "
                        "(launch.start_timeout_s), found that it is not: look at its output"
                    )
                time.sleep(_POLL_S)
            yield
        finally:
            os.close(descriptor)
