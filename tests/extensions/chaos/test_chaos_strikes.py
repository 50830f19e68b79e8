"""Strikes of `dlac chaos` on real processes, and the healing of a run whose progress is scripted."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from dlac_pipeline.extensions.chaos.campaign import ChaosCampaign, ChaosPlan
from dlac_pipeline.extensions.chaos.chaos_job import ChaosJob
from dlac_pipeline.extensions.chaos.faults import PlannedFault, Schedule, parse_kill
from dlac_pipeline.extensions.chaos.run_strikes import RunStrikes
from dlac_pipeline.extensions.chaos.strikes import ranks_below
from dlac_pipeline.extensions.chaos.supervised_nodes import RunProgress, SupervisedNodes
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from tests.conftest import wait_until

if TYPE_CHECKING:
    from tests.conftest import Arena

SURVIVES_S = 1.0
"""Seconds for which ranks outlive a strike on another one: longer than a strike in a cascade waits."""
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


class ScriptedRanks(SupervisedNodes):
    """Two ranks, real processes. Some time after a strike all of them are replaced, or of replica groups the struck ones."""

    def __init__(self, job: ChaosJob, folder: Path) -> None:
        super().__init__(job, folder)
        self.excuses: list[bool] = []
        self.struck: list[int] = []
        """Struck ranks at each replacement."""
        self._folder, self._replicas = folder, job.spec.launch.replicas > 0
        self._ranks = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
        self._step, self._launches_begun, self._struck_at = 1, 1, 0.0

    def start(self) -> None:
        """Start nothing."""

    def tend(self, *, excused: bool, starts: bool = True) -> None:
        """Finish a step if no fault needs healing. Replace the ranks when it is time."""
        self.excuses.append(excused)
        time.sleep(0.01)
        struck = [rank for rank in self._ranks if rank.poll() is not None]
        if not struck:
            self._step += not excused
            return
        self._struck_at = self._struck_at or time.monotonic()
        if time.monotonic() > self._struck_at + SURVIVES_S:
            self.struck.append(len(struck))
            self._replace(struck if self._replicas else self._ranks)

    def _replace(self, ending: list[subprocess.Popen[bytes]]) -> None:
        for rank in ending:
            rank.kill()
            rank.wait()
        self._ranks = [subprocess.Popen(["sleep", "60"]) if rank in ending else rank for rank in self._ranks]
        self._launches_begun += not self._replicas
        self._step, self._struck_at = self._step + 2, 0.0  # one more step that all have finished

    def ranks(self) -> dict[int, psutil.Process]:
        """Return the living ranks."""
        return {number: psutil.Process(rank.pid) for number, rank in enumerate(self._ranks) if rank.poll() is None}

    def launch_folders(self) -> frozenset[Path]:
        """Return the folder of each launch. Replica groups stay in theirs."""
        return frozenset(self._folder / f"launch-{number}" for number in range(1, self._launches_begun + 1))

    def progress(self) -> RunProgress:
        """Return a step that some ranks have finished, and a rank that was killed too, before the strike is noticed."""
        step = self._step - all(rank.poll() is None for rank in self._ranks)
        folder = self._folder / f"launch-{self._launches_begun}"
        return RunProgress(folder=folder, step=step, furthest=self._step, at=time.time(), trains=True)

    def close(self) -> None:
        """End the ranks."""
        for rank in self._ranks:
            rank.kill()
            rank.wait()


def job_of(arena: Arena, *kinds: str, replicas: int = 0, **changes: Any) -> ChaosJob:
    """Return a job for faults of these kinds."""
    program = "train_replicas.py" if replicas else "train_tiny.py"
    return ChaosJob(arena.spec("mine", program, replicas=replicas, world_size=1, **changes), kinds)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [0, 3])
def test_excuse_ends_with_healing(arena: Arena, tmp_path: Path, replicas: int) -> None:
    """An end of a supervisor is excused from a strike until its healing. Replica groups wait for the struck one."""
    kills = [parse_kill("rank@step=4"), parse_kill("rank@step=12")]
    plan = ChaosPlan(schedule=Schedule(kills), kinds=["rank"], cascade=1, away_s=1, healed_within_s=30)
    job = job_of(arena, replicas=replicas)
    with closing(ScriptedRanks(job, tmp_path)) as nodes:
        campaign = ChaosCampaign(job, nodes, Ledger(arena.lakehouse), plan, say=print)
        campaign.run()
    assert len(campaign.faults) == 2
    assert all(fault.recovery_s is not None for fault in campaign.faults)
    changes = [excused for number, excused in enumerate(nodes.excuses) if excused != nodes.excuses[number - 1]]
    assert len(changes) >= 3
    assert sum(nodes.excuses) >= 2 * len(campaign.faults)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [0, 3])
def test_cascade_strikes_new_ranks(arena: Arena, tmp_path: Path, replicas: int) -> None:
    """The second fault waits until all ranks of the struck launch are replaced, or of replica groups the struck one."""
    plan = ChaosPlan(
        schedule=Schedule([parse_kill("rank@step=4")]), kinds=["rank"], cascade=2, away_s=1, healed_within_s=30
    )
    job = job_of(arena, replicas=replicas)
    with closing(ScriptedRanks(job, tmp_path)) as nodes:
        campaign = ChaosCampaign(job, nodes, Ledger(arena.lakehouse), plan, say=print)
        campaign.run()
        assert nodes.struck == [1, 1]
    assert [fault.during for fault in campaign.faults] == [None, 1]


def test_store_without_folder_is_not_struck(arena: Arena, tmp_path: Path) -> None:
    """A drawn fault that finds no folder of the run in the store is left out. A listed one may strike once there is one."""
    job, said = job_of(arena, "store", store=str(tmp_path / "store")), list[str]()
    drawn = [PlannedFault(kind="store")]
    plan = ChaosPlan(schedule=Schedule(drawn=drawn), kinds=["store"], cascade=1, away_s=1, healed_within_s=0.1)
    with closing(ScriptedRanks(job, tmp_path)) as nodes:
        campaign = ChaosCampaign(job, nodes, Ledger(arena.lakehouse), plan, say=said.append)
        with pytest.raises(SpecInvalid, match="after 0: let them strike earlier"):
            campaign.run()
        strikes = RunStrikes(job, nodes, Ledger(arena.lakehouse), away_s=0, tend=lambda: None, say=print)
        assert strikes.strike(parse_kill("store@step=1"), random.Random(0)) is None
        (tmp_path / "store" / "mine").mkdir(parents=True)
        assert strikes.strike(parse_kill("store@step=1"), random.Random(0)) is not None
    assert said[0].endswith("found none: it needs the run's folder in the checkpoint store. It is left out")
