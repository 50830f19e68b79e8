"""A fixture of unit tests, which start no process, open no socket and do not sleep. Tests that need one are in tests/process."""

import inspect
import sys
import threading
import time
from collections.abc import Iterator

import pytest

REFUSED = {
    **dict.fromkeys(("os.fork", "os.posix_spawn", "subprocess.Popen"), "start no process"),
    **dict.fromkeys(("socket.bind", "socket.connect"), "open no socket"),
}
"""Audit event -> what a unit test must do instead of it."""
LONGEST_SLEEP_S = 0.05
_running: list[str] = []
"""Name of the running unit test."""


def _refuse(event: str, _: tuple[object, ...]) -> None:
    # Threads that an earlier test of another folder left in this process are no concern of the running test.
    if event in REFUSED and _running and threading.current_thread() is threading.main_thread() and not _imports():
        pytest.fail(f"expected unit test {_running[-1]} to {REFUSED[event]}, found {event}: move it to tests/process")


def _imports() -> bool:
    """Return whether a module is imported: some libraries ask a process for the platform, in the first test that imports them."""
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


sys.addaudithook(_refuse)


@pytest.fixture
def only_this_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a test that starts a process, opens a socket or sleeps. Threads of the product may poll."""
    assert not hasattr(request.module, "TCPStore"), "torch's store opens a socket, and has no audit event"
    sleep = time.sleep

    def sleep_shortly(seconds: float) -> None:
        if seconds > LONGEST_SLEEP_S and threading.current_thread() is threading.main_thread():
            pytest.fail(f"expected a unit test to sleep at most {LONGEST_SLEEP_S} s, found {seconds} s")
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", sleep_shortly)
    _running.append(request.node.name)
    yield
    _running.pop()
