"""Strikes of `dlac chaos` on real processes, and the healing of a run whose progress is scripted."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from dlac_pipeline.chaos.campaign import ChaosCampaign, ChaosPlan
from dlac_pipeline.chaos.chaos_job import ChaosJob
from dlac_pipeline.chaos.faults import Schedule, parse_kill
from dlac_pipeline.chaos.strikes import ranks_below
from dlac_pipeline.chaos.supervised_nodes import RunProgress, SupervisedNodes
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.conftest import Arena

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
from dlac_pipeline.chaos.strikes import suspend
with suspend([psutil.Process(int(sys.argv[1]))]):
    time.sleep(60)
"""


def test_worker_is_no_rank() -> None:
    """A process that a rank forks has its title. The rank is the one that is found."""
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


class ScriptedNodes(SupervisedNodes):
    """Nodes whose rank is a real process. All other ranks finish a step at each look, except `late` looks after a strike."""

    def __init__(self, job: ChaosJob, folder: Path, *, late: int) -> None:
        super().__init__(job, folder)
        self.excuses: list[bool] = []
        self._late, self._waits, self._folder = late, 0, folder
        self._victim = subprocess.Popen(["sleep", "60"])
        self._step, self._launches_begun = 1, 1

    def start(self) -> None:
        """Start nothing."""

    def tend(self, *, excused: bool, starts: bool = True) -> None:
        """Note whether an end is excused, and replace the rank if it was killed."""
        self.excuses.append(excused)
        if excused:
            with suppress(subprocess.TimeoutExpired):  # a killed process needs a moment to end
                self._victim.wait(0.2)
        if self._victim.poll() is None:
            self._step += 1
        elif self._waits < self._late:
            self._waits += 1
        else:
            self._victim, self._waits = subprocess.Popen(["sleep", "60"]), 0
            self._step, self._launches_begun = self._step + 1, self._launches_begun + 1

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the rank."""
        return {0: psutil.Process(self._victim.pid)}

    def launch_folders(self) -> frozenset[Path]:
        """Return the folder of each launch. Replica groups stay in theirs."""
        return frozenset(self._folder / f"launch-{number}" for number in range(1, self._last_folder() + 1))

    def _last_folder(self) -> int:
        return 1 if self._late else self._launches_begun

    def progress(self) -> RunProgress:
        """Return a step that some ranks have finished, and a rank that was killed too, before the strike is noticed."""
        step = self._step - (self._victim.poll() is None)
        folder = self._folder / f"launch-{self._last_folder()}"
        return RunProgress(folder=folder, step=step, furthest=self._step, at=time.time(), trains=True)

    def close(self) -> None:
        """End the rank."""
        self._victim.kill()
        self._victim.wait()


@pytest.fixture
def nodes(arena: Arena, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[ChaosJob, ScriptedNodes]]:
    """Return a job and its nodes."""
    program, replicas = ("train_replicas.py", 3) if request.param else ("train_tiny.py", 0)
    job = ChaosJob(arena.spec("mine", program, replicas=replicas, world_size=1), ())
    found = ScriptedNodes(job, tmp_path, late=request.param)
    yield job, found
    found.close()


@pytest.mark.parametrize("nodes", [0, 4], indirect=True)
def test_excuse_ends_with_healing(arena: Arena, nodes: tuple[ChaosJob, ScriptedNodes]) -> None:
    """An end of a supervisor is excused from a strike until its healing. Replica groups wait for the struck one."""
    job, scripted = nodes
    kills = [parse_kill("rank@step=4"), parse_kill("rank@step=12")]
    plan = ChaosPlan(schedule=Schedule(kills), kinds=["rank"], cascade=1, away_s=1, healed_within_s=30)
    campaign = ChaosCampaign(job, scripted, Ledger(arena.lakehouse), plan, say=print)
    campaign.run()
    assert len(campaign.faults) == 2
    assert all(fault.recovery_s is not None for fault in campaign.faults)
    changes = [excused for number, excused in enumerate(scripted.excuses) if excused != scripted.excuses[number - 1]]
    assert len(changes) >= 3
    assert sum(scripted.excuses) >= 2 * (scripted._late + 1)
