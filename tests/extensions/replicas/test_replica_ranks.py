"""Replica groups as the supervisor sees them: dead, hung and ended ones, without processes."""

import json
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlac_pipeline.elastic.ranks.launch_folder import reason_file
from dlac_pipeline.extensions.replicas.replica_ranks import ReplicaRanks
from dlac_pipeline.lakehouse.errors import TrainingFailed
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.failure import HangDetector
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase, Spent, read_heartbeat

pytestmark = pytest.mark.usefixtures("only_this_process")

LAUNCH = LaunchSpec(script="train.py", replicas=3, hang_timeout_s=10)
KILLED = -9


class Groups:
    """Three groups of one rank, and what the supervisor has done with them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.codes: dict[int, int] = {}
        self.started: list[int] = []
        self.fails: Exception | None = None
        processes: Any = SimpleNamespace(
            ranks=range(3),
            exit_code=self.codes.get,
            kill=self._kill,
            reason=lambda rank: {},
            start_again=self._start_again,
        )
        lighthouse: Any = SimpleNamespace(restart_dead=self._restart_lighthouse, has_started=True)
        self.ranks = ReplicaRanks(folder, processes, LAUNCH, lighthouse, restart=self._restart)
        for rank in range(3):
            self.beat(rank, Phase.TRAINING)

    def beat(self, rank: int, phase: Phase, *, rows: int = 0) -> None:
        """Write a heartbeat of a rank at step 7."""
        with closing(HeartbeatFile(self.folder, rank)) as file:
            file.write(7, phase, spent=Spent(rows=rows))

    def die(self, rank: int, code: int = KILLED, **reason: Any) -> None:
        """End a rank, with a reason if it has one."""
        if reason:
            reason_file(self.folder, rank).write_text(json.dumps(reason))
        self.codes[rank] = code

    def _kill(self, rank: int) -> None:
        self.codes[rank] = KILLED

    def _restart(self, group: int) -> Any:
        if self.fails is not None:
            raise self.fails
        self.started.append(group)
        return {group: object()}

    def _start_again(self, start: Any) -> None:
        for rank in start():
            del self.codes[rank]

    def _restart_lighthouse(self) -> str:
        if self.fails is not None:
            raise self.fails
        return ""


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    """Three groups that train."""
    return Groups(tmp_path)


def test_death_after_the_end_is_no_failure(groups: Groups) -> None:
    """The committer exports the model of the finished run: no group is replaced. A failed export is an error of the run."""
    groups.beat(0, Phase.DONE)
    groups.die(1)
    groups.die(2, code=1, kind="RuntimeError", origin="peer", place="gloo")
    assert groups.ranks.replace_dead() == []
    assert groups.ranks.failures() == []
    groups.die(0, code=0)
    assert groups.ranks.failures() == []
    groups.die(0, code=1, kind="ValueError", origin="script", place="export")
    assert [each.rank for each in groups.ranks.failures()] == [0]


def test_dead_group_is_not_hung(groups: Groups) -> None:
    """A dead group that is not started again sends no heartbeat, and is not to blame for that."""
    now = [0.0]
    hangs = HangDetector(LAUNCH, lambda: now[0])
    groups.die(1)

    def find_hang() -> Any:
        return hangs.find_hang(groups.ranks.heartbeats(), gone=groups.ranks.gone())

    assert find_hang() is None
    now[0] = 11.0
    for rank in (0, 2):
        groups.beat(rank, Phase.CHECKPOINT)
    assert find_hang() is None


def test_group_that_waits_is_not_hung(groups: Groups) -> None:
    """The committer hangs in a checkpoint. The others have waited for it for longer."""
    now = [0.0]
    hangs = HangDetector(LAUNCH, lambda: now[0])
    for rank in (1, 2):
        groups.beat(rank, Phase.WAITING)
    assert hangs.find_hang(groups.ranks.heartbeats()) is None
    now[0] = 5.0
    groups.beat(0, Phase.CHECKPOINT)
    assert hangs.find_hang(groups.ranks.heartbeats()) is None
    now[0] = 12.0
    assert hangs.find_hang(groups.ranks.heartbeats()) is None
    now[0] = 16.0
    hung = hangs.find_hang(groups.ranks.heartbeats())
    assert hung is not None
    assert hung.rank == 0


def test_replaced_group_has_time_to_start(groups: Groups) -> None:
    """The heartbeat of the dead process is replaced, and its rows are kept for the account of an attempt that fails."""
    groups.beat(1, Phase.TRAINING, rows=100)
    groups.die(1)
    (replaced,) = groups.ranks.replace_dead()
    assert (replaced.group, groups.started) == (1, [1])
    heartbeat = read_heartbeat(groups.folder, 1)
    assert heartbeat is not None
    assert (heartbeat.phase, heartbeat.step) == (Phase.STARTING, 7)
    assert groups.ranks.rows_of_dead == 100


@pytest.mark.parametrize(("origin", "ends"), [("peer", False), ("passing", False), ("script", True)])
def test_lost_connections_are_no_repeated_exception(groups: Groups, origin: str, ends: bool) -> None:
    """Two groups that lose a peer raise at the same place. The next process need not."""
    for rank in (1, 2):
        groups.die(rank, code=1, kind="RuntimeError", origin=origin, place="the same")
        groups.ranks.replace_dead()
    assert groups.started == ([1] if ends else [1, 2])
    assert bool(groups.ranks.failures()) == ends


def test_group_that_cannot_start_ends_attempt(groups: Groups) -> None:
    """A start that fails is tried again, and is then the failure of the attempt."""
    groups.fails = OSError("no process left")
    groups.die(1)
    for _ in range(LAUNCH.attempts_without_progress):
        assert groups.ranks.failures() == []
        groups.ranks.replace_dead()
    assert "no process left" in str(groups.ranks.failures()[0])
    assert groups.ranks.replace_dead() == []


def test_running_lighthouse_resets_the_count(groups: Groups) -> None:
    """Only consecutive failed starts count. A lighthouse that runs between them resets the count, also one that does not die."""
    for _ in range(2):
        groups.fails = TrainingFailed("no port left")
        for _ in range(2):
            groups.ranks.restart_lighthouse()
        groups.fails = None
        assert groups.ranks.restart_lighthouse() == "no port left", "a warning says so"
        assert groups.ranks.failures() == []
