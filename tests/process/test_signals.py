"""Signals to a launcher whose main thread uses the same objects as the handlers."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from dlac_pipeline.launchers.signals import on_ending_signals
from tests.conftest import PROGRAMS

SIGNALS = 3000


def test_many_signals_block_nothing() -> None:
    """The first signal arrives while the main thread holds the event that its handler sets. Thousands follow during the wait."""
    command = [sys.executable, str(PROGRAMS / "wait_for_signals.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        killer = threading.Timer(60, process.kill)
        killer.start()
        try:
            assert process.stdout.readline() == "ready\n"
            for _ in range(SIGNALS):
                process.send_signal(signal.SIGUSR1)
            process.send_signal(signal.SIGUSR2)
            assert process.stdout.readline() == "done\n"
        finally:
            killer.cancel()
    assert process.returncode == 0


@pytest.fixture
def hangup() -> Iterator[None]:
    """Restore this process's handlers of SIGHUP and of all signals that end a launch."""
    handlers = {
        number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    }
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("hangup")
def test_ignored_signal_stays_ignored() -> None:
    """With `nohup` a launch outlives its terminal. A second signal is handled like the first."""
    handled = threading.Semaphore(0)
    on_ending_signals(handled.release)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        os.kill(os.getpid(), number)
        assert handled.acquire(timeout=60)
