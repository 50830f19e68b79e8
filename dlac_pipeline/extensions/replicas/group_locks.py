"""Locks by which the first ranks of replica groups find each other without a supervisor. The kernel ends them with their process.

- The run's lock: a group that claims the run has it alone, groups with the state of the run share it.
- `groups.lock`: one group at a time looks at the run's lock and changes it.
- A lock of each group in the launch folder, which `launch-of-groups` names.
"""

import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

from dlac_pipeline.checkpoint.store import storing
from dlac_pipeline.extensions.replicas.rank import has_held, hold_group
from dlac_pipeline.lakehouse.durable_io import lock_at_once, write_durably
from dlac_pipeline.lakehouse.errors import RunBusy
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.run_lock import leads_to, lock_path, run_lock, write_id

_NAMES_LAUNCH = "launch-of-groups"


class GroupLocks:
    """The locks of one group's first rank."""

    def __init__(self, spec: JobSpec, group: int, held: ExitStack) -> None:
        """`held` gives them back at its end."""
        self._local, self._run, self._group, self._held = spec.checkpoint.local, spec.run, group, held
        self._folder = Path(self._local) / self._run
        self._alone: int | None = None
        self._shared: int | None = None
        self._taken = ExitStack()
        """The run's lock alone, until `begin`."""
        held.callback(self.leave)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Let one group at a time decide. A claim in between may take its time. One that fails leaves the run's lock first."""
        with storing(self._folder):
            descriptor = os.open(self._folder / "groups.lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            with self._taken:
                yield
        finally:
            os.close(descriptor)

    @property
    def launch_folder(self) -> Path:
        """The launch folder of the groups that train. Raise `FileNotFoundError` before the first launch."""
        return self._folder / (self._folder / _NAMES_LAUNCH).read_text()

    def take(self, *, takeover: bool) -> bool:
        """Take the run's lock alone, and return True, or share it with the groups that train.

        Raise `RunBusy` if another launch has it, unless `takeover` replaces its lock.
        """
        if self._take_alone():
            return True
        self._shared = share_run_lock(self._local, self._run)
        if self._shared is not None and _is_shared_by_others(self._shared):
            return False
        self.leave()
        self._alone = self._taken.enter_context(self._lock(takeover=takeover))
        return True

    def share(self) -> bool:
        """Share the run's lock with other groups. Return False if a launch has it alone."""
        self._shared = share_run_lock(self._local, self._run)
        return self._shared is not None

    def leave(self) -> None:
        """Give the shared lock back."""
        shared, self._shared = self._shared, None
        if shared is not None:
            os.close(shared)

    def begin(self, launch_folder: Path) -> None:
        """Let other groups share the run's lock, which this one has alone, and join this launch."""
        assert self._alone is not None, "this group has claimed the run"
        self.hold(launch_folder)
        with storing(self._folder):
            write_durably(self._folder / _NAMES_LAUNCH, launch_folder.name.encode())
        self._held.enter_context(self._taken.pop_all())
        if not lock_at_once(self._alone, fcntl.LOCK_SH):
            raise RunBusy(f"expected no other launch of run {self._run!r}, found one that began in this moment")

    def hold(self, launch_folder: Path) -> bool:
        """Lock the number of this group in a launch. Return True if another process had it before. Raises as `hold_group`."""
        replaces = has_held(launch_folder, self._group)
        with storing(launch_folder):
            self._held.callback(os.close, hold_group(launch_folder, self._group))
        return replaces

    def name_holder(self) -> None:
        """Keep a living process in the run's lock."""
        lock = self._alone if self._shared is None else self._shared
        if lock is not None:
            name_holder(lock)

    @property
    def has_state(self) -> bool:
        """True if this group has shown that it has the state: it has a part in the run's lock."""
        return self._alone is not None or self._shared is not None

    def is_shared(self) -> bool:
        """Return True if groups have the run's lock. This one has no part in it, also for a thread that calls `name_holder`."""
        descriptor = share_run_lock(self._local, self._run)
        if descriptor is None:
            return False
        try:
            return _is_shared_by_others(descriptor)
        finally:
            os.close(descriptor)

    def _take_alone(self) -> bool:
        with suppress(RunBusy):
            self._alone = self._taken.enter_context(self._lock())
            return True
        return False

    def _lock(self, *, takeover: bool = False) -> AbstractContextManager[int]:
        return run_lock(self._local, self._run, wait_s=0.0, takeover=takeover)


def share_run_lock(local: str, run: str) -> int | None:
    """Return a descriptor that has the run's lock together with others that share it, or None if one holds it alone."""
    path = lock_path(local, run)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    if lock_at_once(descriptor, fcntl.LOCK_SH) and leads_to(path, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def name_holder(descriptor: int) -> None:
    """Write this process's id into a shared lock if the process in it has ended: tools look at that process."""
    with suppress(ValueError):
        if psutil.pid_exists(int(os.pread(descriptor, 20, 0))):
            return
    write_id(descriptor)


def _is_shared_by_others(descriptor: int) -> bool:
    """Return True if other processes share the lock that this descriptor shares. A failed conversion of a lock loses it."""
    return not lock_at_once(descriptor, fcntl.LOCK_EX) and lock_at_once(descriptor, fcntl.LOCK_SH)
