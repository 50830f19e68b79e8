"""Strikes of `dlac chaos` on real processes."""

import subprocess
import sys

import psutil

from dlac_pipeline.extensions.chaos.strikes import ranks_below
from tests.conftest import wait_until

RANK_WITH_WORKER = """
import os, time
from setproctitle import setproctitle
if not os.fork():
    setproctitle("dlac mine rank 1/2")
    os.fork()
time.sleep(60)
"""
SUSPENDS = """
import sys, time, psutil
from dlac_pipeline.extensions.chaos.strikes import suspend
with suspend([psutil.Process(int(sys.argv[1]))]):
    time.sleep(60)
"""


def test_worker_is_no_rank() -> None:
    """A process that a rank forks has its title. The search finds the rank."""
    with subprocess.Popen([sys.executable, "-c", RANK_WITH_WORKER]) as process:
        supervisor = psutil.Process(process.pid)

        def titled() -> list[psutil.Process]:
            return [each for each in supervisor.children(recursive=True) if "rank" in " ".join(each.cmdline())]

        wait_until(lambda: len(titled()) == 2, what="a rank and its worker")
        found, first = ranks_below(supervisor, "mine"), supervisor.children()[0]
        for each in (*titled(), supervisor):
            each.kill()
    assert found == {1: first}


def test_stopped_process_outlives_command() -> None:
    """A process that a command has stopped continues when the command is killed."""
    with subprocess.Popen(["sleep", "60"]) as stopped:
        process = psutil.Process(stopped.pid)
        with subprocess.Popen([sys.executable, "-c", SUSPENDS, str(stopped.pid)]) as command:
            wait_until(lambda: process.status() == psutil.STATUS_STOPPED, what="the stop")
            command.kill()
            wait_until(lambda: process.status() != psutil.STATUS_STOPPED, what="the end of the stop")
        stopped.kill()
