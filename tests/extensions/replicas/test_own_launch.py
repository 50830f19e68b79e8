"""Replica groups that find each other without a supervisor, in one process, where each opening of a file locks separately."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.elastic.ranks.this_process import GROUP_VARIABLE
from dlac_pipeline.extensions.replicas import own_launch
from dlac_pipeline.extensions.replicas.own_launch import OwnLaunch
from dlac_pipeline.extensions.replicas.rank import is_dead
from dlac_pipeline.lakehouse.errors import RunBusy, SpecInvalid, TrainingFailed
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from tests.conftest import Arena

RUN = "r"
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"


def begin_launch(
    arena: Arena, number: int, held: ExitStack, *, restarted: bool = False, takeover: bool = False, **changes: Any
) -> OwnLaunch:
    """Let a group claim the run, or join. `changes` are fields of the job spec. `restarted`: by torchrun, after a failure."""
    arena.monkeypatch.setenv(GROUP_VARIABLE, str(number))
    arena.monkeypatch.setenv(_RESTARTS, str(int(restarted)))
    arena.monkeypatch.setenv("LOCAL_RANK", "0")  # its launcher is the process that has started the tests
    communicator: Any = SimpleNamespace(rank=0, world_size=1, tree=RankTree(0, 1, None), is_first_of_node=True)
    spec = arena.spec(RUN, **{"replicas": 3, "world_size": 1, **changes})
    return OwnLaunch(Plans(arena.lakehouse), spec, communicator, takeover=takeover, held=held)


class Group:
    """The first rank of a group, as far as its launch knows it. `end` is its death."""

    def __init__(self, arena: Arena, number: int, **how: Any) -> None:
        """Begin a launch with the arguments of `begin_launch`."""
        self.number, self.local = number, arena.spec(RUN).checkpoint.local
        with ExitStack() as held:
            self.launch = begin_launch(arena, number, held, **how)
            self._held = held.pop_all()

    def end(self) -> None:
        """Give all locks back, as the kernel does for a dead process."""
        self._held.close()

    def note(self, phase: Phase) -> None:
        """Write its heartbeat."""
        file = HeartbeatFile(self.launch.folder, self.number)
        file.write(5, phase)
        file.close()


@pytest.fixture
def start(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Group]]:
    """Yield a function that starts a group of a run on a table. No lighthouse runs."""
    monkeypatch.setattr(own_launch, "LighthouseWatch", lambda *given, **how: SimpleNamespace(close=lambda: None))
    arena.table()
    with ExitStack() as ends:

        def begin(number: int, **how: Any) -> Group:
            group = Group(arena, number, **how)
            ends.callback(group.end)
            return group

        yield begin


def attempts(arena: Arena) -> list[int]:
    """Return the attempts that were claimed."""
    return [row.attempt for row in arena.rows(RUN, ClaimRow)]


def test_first_group_claims_and_others_join(arena: Arena, start: Callable[..., Group]) -> None:
    """All groups have the state of the resume point. Another launch is refused while any group lives."""
    first, second = start(2), start(0)
    assert (first.launch.claimed, second.launch.claimed) == (True, False)
    assert not (first.launch.rejoins)
    assert not (second.launch.rejoins)
    assert first.launch.folder == second.launch.folder
    assert first.launch.point == second.launch.point
    first.end()
    with pytest.raises(RunBusy), run_lock(second.local, RUN, wait_s=0.0, takeover=False):
        pass
    second.end()
    assert start(1).launch.point.attempt == 2
    assert attempts(arena) == [1, 2]


def test_dead_group_needs_state_of_a_peer(arena: Arena, start: Callable[..., Group]) -> None:
    """A restarted group shares the run's lock once it has it. If all peers die before, there is nothing left to join."""
    first, second = start(0), start(1)
    first.note(Phase.TRAINING)
    first.end()
    assert is_dead(second.launch.folder, 0)
    again = start(0, restarted=True)
    assert again.launch.rejoins
    assert not again.launch.is_abandoned()
    second.end()
    assert again.launch.is_abandoned()
    again.end()
    third = start(0, restarted=True)
    assert (third.launch.claimed, third.launch.rejoins) == (True, False)
    assert attempts(arena) == [1, 2]


def test_healed_group_keeps_the_attempt(arena: Arena, start: Callable[..., Group]) -> None:
    """A group with the state of a peer is one that others can join."""
    first, second = start(0), start(1)
    second.end()
    again = start(1, restarted=True)
    again.launch.met()
    first.end()
    assert not again.launch.is_abandoned()
    assert start(0, restarted=True).launch.rejoins
    assert attempts(arena) == [1]


def test_newcomer_notices_another_attempt(arena: Arena, start: Callable[..., Group]) -> None:
    """While it builds its model, the groups with the state die, and `dlac train` or a restarted group has the run's lock."""
    first, second = start(0), start(1)
    second.end()
    newcomer = start(1, restarted=True)
    first.end()
    with run_lock(newcomer.local, RUN, wait_s=0.0, takeover=False):
        assert newcomer.launch.is_abandoned()
    assert start(0, restarted=True).launch.point.attempt == 2
    assert newcomer.launch.is_abandoned()
    with pytest.raises(TrainingFailed, match="group 1 to train in attempt 1, found that another launch has begun"):
        newcomer.launch.met()
    newcomer.end()
    assert start(1, restarted=True).launch.point.attempt == 2


def test_late_group_has_no_state(arena: Arena, start: Callable[..., Group]) -> None:
    """After its peers have formed a quorum, the resume point is not the state of the run any more."""
    first, second = start(0), start(1)
    assert not second.launch.rejoins
    first.launch.met()
    late = start(2)
    assert late.launch.rejoins
    first.end()
    second.end()
    assert late.launch.is_abandoned()


def test_absent_group_is_awaited_for_a_while(arena: Arena, start: Callable[..., Group]) -> None:
    """After `launch.last_call_s` only groups that have been started are."""
    first = start(0, last_call_s=30)
    start(1, last_call_s=30)
    assert [first.launch.may_come(each) for each in (1, 2)] == [True, True]
    path = first.launch.folder / "resume.json"
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 31))
    assert [first.launch.may_come(each) for each in (1, 2)] == [True, False]
    assert start(2, last_call_s=30).launch.rejoins  # the quorum is formed without it


@pytest.mark.parametrize("ending", ["stopped", "left", "caught_up"])
def test_ended_run_is_not_trained_on(arena: Arena, start: Callable[..., Group], ending: str) -> None:
    """A group that torchrun starts again afterwards has nothing to do. A person may start the run again."""
    groups = [start(0), start(1), start(2)]
    folder = groups[0].launch.folder
    EventWriter(folder, 0).write({"event": "training", "step": 5, "total_steps": None})
    EventWriter(folder, 0).write({"event": ending, "step": 5})
    groups[0].note(Phase.DONE)
    groups[1].note(Phase.WAITING)
    for group in groups:
        group.end()
    with pytest.raises(SystemExit) as ended:
        start(1, restarted=True)
    assert ended.value.code == 0
    with pytest.raises(
        TrainingFailed, match="the script of group 0 to end with the run, found that it failed after that"
    ):
        start(0, restarted=True)
    assert attempts(arena) == [1]
    assert start(0).launch.point.attempt == 2


def test_stop_without_time_ends_the_run(arena: Arena, start: Callable[..., Group]) -> None:
    """They were asked to stop, and their deadline has ended them. A stop before the torchruns were started does not count."""
    group = start(0)
    group.launch.note_stop()
    group.note(Phase.TRAINING)
    group.end()
    with pytest.raises(SystemExit):
        start(0, restarted=True)
    assert attempts(arena) == [1]
    os.utime(group.launch.folder / "stops", (1, 1))
    assert start(0, restarted=True).launch.point.attempt == 2


def test_failed_claim_leaves_the_lock_first(
    arena: Arena, start: Callable[..., Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group that decides next finds the run's lock free, although the process with the failure still runs."""

    def fail(*given: Any, **how: Any) -> Any:
        raise TrainingFailed("the catalog is away")

    with ExitStack() as held:
        with monkeypatch.context() as failing:
            failing.setattr(own_launch, "claim_now", fail)
            with pytest.raises(TrainingFailed, match="away"):
                begin_launch(arena, 0, held)
        assert start(1).launch.claimed


def test_launch_elsewhere_is_taken_over_only_on_request(arena: Arena, start: Callable[..., Group]) -> None:
    """A supervisor has the lock alone. Groups with `takeover` replace it, and then each other's dead ones only."""
    local = arena.spec(RUN).checkpoint.local
    os.makedirs(f"{local}/{RUN}")
    with run_lock(local, RUN, wait_s=0.0, takeover=False):
        with pytest.raises(RunBusy):
            start(0)
        assert start(0, takeover=True).launch.claimed
        assert not start(1, takeover=True).launch.claimed
    assert attempts(arena) == [1]


def test_other_job_spec_is_refused(arena: Arena, start: Callable[..., Group]) -> None:
    """It would read other batches."""
    first = start(0)
    with pytest.raises(SpecInvalid, match="expected the job spec of the groups that train run 'r'"):
        start(1, batch_size=16)
    assert json.loads((first.launch.folder / "spec.json").read_text())["order"]["batch_size"] == 32
    assert not start(1).launch.rejoins
