"""The fixture of this folder fails tests that leave their process or wait."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest


def use_socket(method: str) -> None:
    """Bind or connect a socket."""
    with socket.socket() as opened:
        getattr(opened, method)(("127.0.0.1", 1))


@pytest.mark.parametrize(
    ("leave", "reason"),
    [
        (lambda: subprocess.run([sys.executable, "-V"], check=True), "start no process"),
        (os.fork, "start no process"),
        (lambda: use_socket("bind"), "open no socket"),
        (lambda: use_socket("connect"), "open no socket"),
        (lambda: time.sleep(0.1), "sleep at most"),
    ],
)
def test_unit_test_stays_in_process(leave: Callable[[], object], reason: str) -> None:
    """A unit test that starts a process, opens a socket or sleeps fails, and the message names the reason."""
    with pytest.raises(pytest.fail.Exception, match=reason):
        leave()
