"""The rules of the tests: unit tests stay in their process, and the list of mutants names lines and tests that exist."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mutants import read_mutants


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


_TREE = Path(__file__).parents[2]


def test_mutants_name_existing_lines() -> None:
    """A line that was changed since would make its mutant test nothing."""
    for mutant in read_mutants():
        assert mutant.changed((_TREE / mutant.file).read_text()), mutant.name
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert f"def {name.partition('[')[0]}" in (_TREE / file).read_text(), (mutant.name, test)
