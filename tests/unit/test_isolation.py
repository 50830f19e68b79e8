"""The fixture of this folder fails tests that leave their process or wait."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest


def bind() -> None:
    """Bind a socket."""
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))


def connect() -> None:
    """Connect a socket."""
    with socket.socket() as opened:
        opened.connect(("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (lambda: subprocess.run([sys.executable, "-V"], check=True), "start no process"),
        (os.fork, "start no process"),
        (bind, "open no socket"),
        (connect, "open no socket"),
        (lambda: time.sleep(0.1), "sleep at most"),
    ],
)
def test_unit_test_stays_in_process(leave: Callable[[], object], reason: str) -> None:
    """A unit test that starts a process, opens a socket or sleeps fails, and the message names the reason."""
    with pytest.raises(pytest.fail.Exception, match=reason):
        leave()
