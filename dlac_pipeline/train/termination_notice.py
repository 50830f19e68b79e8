"""Termination notices of a rank: signals, a termination URL, the end of its launcher, and a watchdog for the deadline.

A thread receives signals even while the main thread waits in a collective or for a disk. It ends the process when the
deadline passes: a rank that is stuck must not outlive its node's remaining time.
"""

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import psutil

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.lakehouse.errors import Preempted
from dlac_pipeline.spec.launch_spec import LaunchSpec

NOTICE_SOURCES = Door("dlac.notices", "source of termination notices")
AwaitNotice = Callable[[LaunchSpec, Callable[[float], bool]], bool]
"""Function that returns True once a termination of the node is announced. Its second argument waits some seconds.

If that returns True, no notice is awaited any more, and the function returns False.
"""
_LOOK_EVERY_S = 0.5
_LAST_WORDS_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


@dataclass(frozen=True, slots=True)
class Notice:
    """The first notice that a rank received."""

    name: str
    """Notice from `launch_spec.NOTICES`."""
    at: float
    """Moment of the notice in monotonic seconds."""


class Notices:
    """Sources of termination notices for one rank. At the deadline `on_deadline` is called and the process is ended."""

    def __init__(
        self,
        launch: LaunchSpec,
        *,
        local_rank: int,
        launched: bool,
        on_deadline: Callable[[], None],
        notice_file: Path | None = None,
        stop_file: Path | None = None,
    ) -> None:
        """Listen for notices, among them the end of the launcher if `launched`. The first one makes `notice_file`.

        `stop_file` appears when the supervisor requests a stop. The script may have replaced the handler of its signal.
        """
        self._launch = launch
        self._stop_file = stop_file
        self._notice_file = notice_file
        self._on_deadline = on_deadline
        self.first: Notice | None = None
        self._deadline: float | None = None
        self._closed = threading.Event()
        self._wakeup_receiver, self._wakeup_sender = socket.socketpair()
        self._handlers: dict[int, signal._HANDLER] = {}
        self._wakeup_sender.setblocking(False)
        if threading.current_thread() is threading.main_thread():
            self._wakeup_before = signal.set_wakeup_fd(self._wakeup_sender.fileno(), warn_on_full_buffer=False)
            self._handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
            _OPEN.add(self)
        self._launchers = _launchers() if launched else []
        threading.Thread(target=self._watch, name="notices", daemon=True).start()
        if launch.termination_url and local_rank == 0:
            found: AwaitNotice = NOTICE_SOURCES.load("url", setting="launch.termination_url")
            threading.Thread(target=self._await, args=(found,), name="termination-url", daemon=True).start()

    def leave_by(self, deadline: float) -> None:
        """End the process at `deadline`, in monotonic seconds, or at its present deadline if that is earlier."""
        self._deadline = deadline if self._deadline is None else min(deadline, self._deadline)
        self._wake()

    def close(self) -> None:
        """Restore the signal handlers and cancel the deadline."""
        self._closed.set()
        self.restore()
        self._wake()

    def restore(self) -> None:
        """Restore the former signal handlers, also in a forked process, which must not react for this one."""
        _OPEN.discard(self)
        if self._handlers:
            signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._note(signal.Signals(number).name)

    def _note(self, name: str) -> None:
        if self.first is None:
            self.first = Notice(name, time.monotonic())
            if self._notice_file is not None:
                with suppress(OSError):
                    self._notice_file.touch()
            self.leave_by(self.first.at + self._launch.deadline_s)

    def _wake(self) -> None:
        with suppress(OSError):
            self._wakeup_sender.send(b"\0")

    def _watch(self) -> None:
        """Receive signals at once, check the launcher regularly, and enforce the deadline."""
        while not self._closed.is_set():
            left_s = _LOOK_EVERY_S if self._deadline is None else self._deadline - time.monotonic()
            if left_s <= 0:
                last_words = threading.Thread(target=self._on_deadline, daemon=True)
                last_words.start()
                last_words.join(_LAST_WORDS_S)  # its disk may block the rank
                os._exit(Preempted.exit_code)
            self._wakeup_receiver.settimeout(max(0.001, min(left_s, _LOOK_EVERY_S)))
            with suppress(TimeoutError):
                for number in self._wakeup_receiver.recv(64):
                    # The main thread may be stuck in a collective. A handler that the script has installed is left alone.
                    if number in _SIGNALS and signal.getsignal(number) == self._on_signal:
                        self._note(signal.Signals(number).name)
            if self.first is None and self._stop_file is not None and self._stop_file.exists():
                self._note(signal.SIGTERM.name)
            if not all(map(_is_alive, self._launchers)):
                self._note("launcher")
        self._wakeup_receiver.close()
        self._wakeup_sender.close()

    def _await(self, await_notice: AwaitNotice) -> None:
        if await_notice(self._launch, self._wait):
            self._note("termination_url")

    def _wait(self, seconds: float) -> bool:
        """Wait some seconds. Return True once no notice is awaited any more."""
        return self._closed.wait(seconds) or self.first is not None


def _launchers() -> list[psutil.Process]:
    """Return the process that started this one, and DeepSpeed's launcher above it, which people end."""
    parent = psutil.Process().parent()
    if parent is None:
        return []
    found = [parent]
    with suppress(psutil.Error):
        above = parent.parent()
        if above is not None and "deepspeed.launcher.launch" in parent.cmdline() and above.pid > 1:
            found.append(above)
    return found


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


_OPEN: weakref.WeakSet[Notices] = weakref.WeakSet()
"""The notices that listen in this process."""


def _restore_all() -> None:
    for each in list(_OPEN):
        each.restore()


os.register_at_fork(after_in_child=_restore_all)
