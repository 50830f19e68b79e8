"""Replica groups in one process: managers that stand for torchft's, and the state that peers send."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.step_sync import StepSync
from dlac_pipeline.extensions.replicas.checkpointing import GroupSyncs, ReplicaCheckpointing
from dlac_pipeline.extensions.replicas.group import GroupLaunch, ReplicaGroup
from dlac_pipeline.extensions.replicas.rank import (
    has_held,
    has_reached,
    hold_group,
    is_dead,
    is_held,
    mark_dead,
    write_lighthouse,
    write_presence,
)
from dlac_pipeline.extensions.sharded.torchft_state import TorchFTState
from dlac_pipeline.lakehouse.errors import CursorMismatch, RunBusy, ScriptInvalid
from dlac_pipeline.plan.slots import DataCoordinate
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.track.tracker import ReaderStateTracker
from dlac_pipeline.train.checkpoint_policy import CheckpointPolicy
from dlac_pipeline.train.open_attempt import OpenAttempt
from tests.memory_states import fresh_start

pytestmark = pytest.mark.usefixtures("only_this_process")

LIGHTHOUSE = "http://lighthouse"
RAW = {"run": "r", "source": {"table": "src.t", "columns": ["x"]}, "order": {"batch_size": 32}}
SPEC = parse_spec({**RAW, "launch": {"script": "train.py", "replicas": 2}}, origin="the test")


class Meeting:
    """Sums of the tensors of all groups, each of which is a thread."""

    def __init__(self, groups: int) -> None:
        self._barrier = threading.Barrier(groups, timeout=10)
        self._sums: list[torch.Tensor] = []

    def add(self, tensor: torch.Tensor) -> None:
        """Add the tensors of all groups, in place."""
        self._sums.append(tensor.clone())
        self._barrier.wait()
        tensor.copy_(torch.stack(self._sums).sum(0))
        if self._barrier.wait() == 0:
            self._sums.clear()
        self._barrier.wait()


class Manager:
    """Manager of a group at a step, which heals from a peer at step 7 if it has none."""

    def __init__(self, meeting: Meeting) -> None:
        self.steps = [7]
        self._meeting = meeting
        self._manager = object()
        self._error: Exception | None = None

    def allreduce(self, tensor: torch.Tensor, **options: Any) -> Any:
        """Reduce at once."""
        self._meeting.add(tensor)
        return SimpleNamespace(wait=lambda: None)

    def errored(self) -> Any:
        """Return the error since the last quorum."""
        return self._error

    def report_error(self, error: Exception) -> None:
        """Vote no."""
        self._error = error

    def should_commit(self) -> bool:
        """Return the vote."""
        return self._error is None

    def start_quorum(self) -> None:
        """Heal, if the group has no state."""
        self._error = None
        if self.current_step() < 0:
            self.steps.append(7)

    def current_step(self) -> int:
        """Return the step."""
        return self.steps[-1]

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Set the step."""
        self.steps.append(state["step"])

    def participating_rank(self) -> int:
        """Return the place in the quorum."""
        return 0

    def num_participants(self) -> int:
        """Return the number of groups in the quorum."""
        return 2


def group_of(folder: Path, number: int = 0, *, rejoins: bool = False, **inner: Any) -> ReplicaGroup:
    """Return one of two groups, of one rank, that has reached the lighthouse. `inner` replaces what it is made of."""
    communicator: Any = SimpleNamespace(rank=0, world_size=1, add=lambda numbers: None)
    group = ReplicaGroup(number, 2, GroupLaunch(folder, rejoins=rejoins), communicator, limit_s=10)
    vars(group).update(_lighthouse=LIGHTHOUSE, _peers=SimpleNamespace(meeting="q", drop=lambda works: None), **inner)
    write_lighthouse(folder, LIGHTHOUSE)
    return group


def in_threads(*works: Any) -> list[Any]:
    """Run the works at the same time, and return what they return."""
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda at=at, work=work: found.update({at: work()})) for at, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return [found[at] for at in range(len(works))]


def test_step_done_twice_is_healed(tmp_path: Path) -> None:
    """Groups that did their last step in two quorums drop the next one, and the second group takes the state of the first."""
    meeting = Meeting(2)
    managers = [Manager(meeting), Manager(meeting)]
    groups = [group_of(tmp_path, number, _manager=managers[number]) for number in range(2)]
    groups[0].execution, groups[1].execution = 5, 6
    gradients = [[torch.ones(3)], [torch.ones(3)]]

    def reduce(number: int) -> bool:
        groups[number].has_met = True
        return groups[number].reduce(gradients[number], torch.tensor(1.0))

    assert in_threads(lambda: reduce(0), lambda: reduce(1)) == [False, False]
    for group in groups:
        group.meet()
    assert [manager.steps for manager in managers] == [[7], [7, -1, 7]]
    groups[1].execution = groups[0].execution  # its peer has sent it
    assert in_threads(lambda: reduce(0), lambda: reduce(1)) == [True, True]
    assert groups[0].execution == groups[1].execution != 5


def test_half_healed_group_heals_again(tmp_path: Path) -> None:
    """A rank of the group got the state, and a second one failed: in the next quorum both ask for it."""
    manager = Manager(Meeting(1))
    manager.steps = [-1]
    others = [[0, 1, 0, 0], [0, 0, 1, 0]]
    group = group_of(tmp_path, _manager=manager)
    ranks: Any = SimpleNamespace(rank=0, world_size=2, add=lambda flags: flags.add_(torch.tensor(others.pop(0))))
    vars(group).update(_communicator=ranks)
    group.meet()
    assert manager.steps == [-1, 7, -1, 7]


def test_second_reduction_of_batch_is_refused(tmp_path: Path) -> None:
    """A second one would commit two steps with one batch."""
    group = group_of(tmp_path, _manager=Manager(Meeting(1)))
    group.has_met = True
    assert group.reduce([torch.ones(3)], torch.tensor(1.0))
    with pytest.raises(ScriptInvalid, match=r"one state\.reduce\(loss\) for each batch"):
        group.reduce([torch.ones(3)], torch.tensor(1.0))


def test_newcomer_waits_for_group_with_state(tmp_path: Path) -> None:
    """A quorum without a group that has the state would be its end."""
    newcomer = group_of(tmp_path, rejoins=True, _step=-1)
    write_presence(tmp_path, 0, LIGHTHOUSE)  # its dead process
    waiting = threading.Thread(target=newcomer.wait_for_peers)
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    write_presence(tmp_path, 1, LIGHTHOUSE)
    waiting.join(5)
    assert not waiting.is_alive()


class Replica:
    """One group after some steps, with its parts."""

    def __init__(self, folder: Path, number: int) -> None:
        self.group = group_of(folder, number)
        self.group.share = DataCoordinate(number, 2)
        self.policy = CheckpointPolicy(SPEC, 0, None, MagicMock())
        self.policy.resumed(fresh_start())
        self.tracker = ReaderStateTracker(committed_step=0, groups=range(1))
        self.saved: list[tuple[int, int, bool]] = []
        self.attempt = MagicMock(tracker=self.tracker, rehearses=False, has_unrecorded_leg=False)
        self.attempt.point.replaces = 0
        self.attempt.manager.settle.return_value = None
        self.attempt.manager.begin.side_effect = self._save
        self.attempt.manager.save.side_effect = self._save
        communicator = MagicMock(step_syncs=GroupSyncs(self.group), tree=RankTree(0, 1, None), rank=0, world_size=1)
        parts = (SPEC, self.attempt, communicator, self.policy, MagicMock(), MagicMock())
        self.checkpointing = ReplicaCheckpointing(self.group, *parts)
        model = torch.nn.Linear(2, 1)
        self.checkpointing.engine = TorchFTState(model=model, optimizer=torch.optim.SGD(model.parameters()))

    def _save(self, engine: Any, tracker: ReaderStateTracker, *_: Any, **__: Any) -> None:
        self.saved = list(tracker.step_ranges())
        tracker.take()

    def commit(self, *, applied: bool = True) -> None:
        """Commit the next step."""
        self.tracker.step += 1
        if not applied:
            self.tracker.skipped.append(self.tracker.step)
        self.group.reduced = MagicMock(loss=1.0, head_step=0, groups=(0, 1))
        self.checkpointing.committed()


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[list[Replica]]:
    """Two groups."""
    made = [Replica(tmp_path, number) for number in range(2)]
    yield made
    for each in reversed(made):
        each.policy.close()


def test_newcomer_stops_with_its_peer(replicas: list[Replica]) -> None:
    """A group that dropped the last step before a stop takes the request with the state: the run has not finished."""
    newcomer, peer = replicas
    peer.commit()
    peer.policy.on_sync(StepSync(step=1, losses=[1.0], notice="SIGTERM", due=True))
    peer.checkpointing.ends = "end"
    newcomer.checkpointing.load_peer_state(peer.checkpointing.peer_state())
    assert newcomer.checkpointing.ends == "end"
    assert newcomer.policy.leaving is not None
    assert newcomer.policy.leaving.notice == "SIGTERM"


def test_unfinished_run_is_not_finished() -> None:
    """Whatever a group believes, the ledger does not get the end of a run whose steps are not done."""
    leg, order = MagicMock(following=False), MagicMock(total_steps=10)
    parts = dict.fromkeys(("name", "point", "reader", "manager", "plans"), MagicMock())
    tracker = ReaderStateTracker(committed_step=4, groups=range(1), step=5)
    attempt = OpenAttempt(leg=leg, order=order, tracker=tracker, **parts)
    with pytest.raises(CursorMismatch, match="to end at step 10, found its end at step 5"):
        attempt.end_run(MagicMock(rank=0), stopped=False)
    assert attempt.end_run(MagicMock(rank=0), stopped=True) == "stopped"


def test_skipped_steps_follow_the_committer(replicas: list[Replica]) -> None:
    """A new committer records the steps that the optimizer skipped, whether it did them itself or healed after them."""
    newcomer, peer = replicas
    for applied in (True, False, True):
        peer.commit(applied=applied)
    newcomer.checkpointing.load_peer_state(peer.checkpointing.peer_state())
    expected = [(1, 1, True), (2, 2, False), (3, 3, True)]
    for replica in (newcomer, peer):
        replica.group.share = DataCoordinate(0, 2)
        vars(replica.checkpointing)["_owns_head"] = True
        replica.checkpointing.take("steps")
        assert replica.saved == expected
        replica.commit()
        replica.checkpointing.take("steps")
        assert replica.saved == [(4, 4, True)]


def test_parameter_that_nothing_averages_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare module in a group of several ranks would become another one on each of them."""
    model = torch.nn.Linear(2, 1)
    state = TorchFTState(model=model, optimizer=torch.optim.SGD(model.parameters()))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ScriptInvalid, match="'weight' of 'model' to be sharded over the 2 ranks"):
        state.reduce(torch.tensor(1.0))


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_state_of_other_shape_is_healed(one_rank: None) -> None:
    """The state of an optimizer may be sharded tensors that are shaped unlike their parameter."""
    mesh = init_device_mesh("cpu", (1,))
    states = []
    for value in (1.0, 2.0):
        weight = torch.nn.Parameter(distribute_tensor(torch.full((4, 2), value), mesh, [Shard(0)]))
        model = torch.nn.Module()
        model.register_parameter("weight", weight)
        optimizer = torch.optim.SGD(model.parameters())
        optimizer.state[weight] = {"rows": distribute_tensor(torch.full((4,), value), mesh, [Shard(0)])}
        states.append((model, optimizer, TorchFTState(model=model, optimizer=optimizer)))
    (_, _, peer), (model, optimizer, newcomer) = states
    newcomer.load_peer_state(peer.peer_state())
    assert isinstance(model.weight, torch.Tensor)
    rows = optimizer.state[model.weight]["rows"]
    assert isinstance(rows, DTensor)
    assert rows.full_tensor().tolist() == [1.0] * 4
    assert isinstance(model.weight, DTensor)
    assert model.weight.full_tensor().tolist() == [[1.0, 1.0]] * 4


def test_dead_group_is_not_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A group that died before the first quorum is left out of it. Its process is awaited again once it has met its peers."""
    write_presence(tmp_path, 1, "http://earlier")
    group = group_of(tmp_path, _step=0)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            mark_dead(tmp_path, 1)

    monkeypatch.setattr("dlac_pipeline.extensions.replicas.group.time.sleep", wait)
    group.wait_for_peers()
    assert [seconds > 0 for seconds in waits] == [True, True, True, False]
    write_presence(tmp_path, 1, LIGHTHOUSE)
    assert not is_dead(tmp_path, 1)


@pytest.mark.parametrize("fails", [False, True])
def test_reductions_of_step_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """With two under way Gloo keeps the connections of a failed one, and a peer waits for ever. None follows a failed one."""
    manager, under_way, done = Manager(Meeting(1)), set[int](), list[str]()

    def allreduce(tensor: torch.Tensor, **options: Any) -> Any:
        assert not under_way, "another reduction is under way"
        under_way.add(id(tensor))
        done.append(str(tensor.dtype))

        def wait() -> None:
            under_way.remove(id(tensor))
            if fails:
                manager.report_error(SimpleNamespace(original_exception=OSError("closed")))  # type: ignore[arg-type]

        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(manager, "allreduce", allreduce)
    group = group_of(tmp_path, _manager=manager)
    group.has_met = True
    assert group.reduce([torch.ones(3), torch.ones(3, dtype=torch.bfloat16)], torch.tensor(1.0)) is not fails
    assert done == ["torch.float32", *([] if fails else ["torch.bfloat16", "torch.float64"])]


def test_group_without_supervisor_lives_while_it_holds_its_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its peers wait neither for it nor for its lighthouse once it is dead. Its number is of one process."""
    assert not has_held(tmp_path, 1)
    held = hold_group(tmp_path, 1)
    write_presence(tmp_path, 1, LIGHTHOUSE)
    assert has_held(tmp_path, 1)
    assert is_held(tmp_path, 1)
    assert has_reached(tmp_path, 1, LIGHTHOUSE)
    assert not is_dead(tmp_path, 1)
    monkeypatch.setattr("dlac_pipeline.extensions.replicas.rank.HELD_WITHIN_S", 0.1)
    with pytest.raises(RunBusy, match=rf"REPLICA_GROUP_ID=1, found another one alive \(process {os.getpid()}\)"):
        hold_group(tmp_path, 1)
    os.close(held)
    assert has_held(tmp_path, 1)
    assert not is_held(tmp_path, 1)
    assert not has_reached(tmp_path, 1, LIGHTHOUSE)
    assert is_dead(tmp_path, 1)
    os.close(hold_group(tmp_path, 1))
