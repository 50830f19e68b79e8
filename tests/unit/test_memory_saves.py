"""A rank saves states in memory as often as the copies allow, seals whole ones only, and frees the memory of all others."""

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from dlac_pipeline.checkpoint.collectives import RankTree
from dlac_pipeline.checkpoint.engines import TorchState
from dlac_pipeline.checkpoint.restore.resume_point import ResumePoint
from dlac_pipeline.checkpoint.stage.copies import CopyMemory
from dlac_pipeline.checkpoint.step_gate import StepGate
from dlac_pipeline.checkpoint.step_sync import RankReport, StepSync
from dlac_pipeline.elastic.ranks.rank import LAUNCH_VARIABLE
from dlac_pipeline.lakehouse.errors import MemoryStateLost
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.memory_file import MemoryFile
from dlac_pipeline.memory_states.save import MemorySaves
from dlac_pipeline.plan.order import LegOrder
from dlac_pipeline.plan.slots import ALL_SLOTS
from dlac_pipeline.spec.mesh_spec import DATA_PARALLEL
from dlac_pipeline.track.tracker import ReaderStateTracker
from dlac_pipeline.train.restored_state import lose_if_unreadable, read_memory
from tests.memory_states import OWN, fresh_start, keep, part_of, spec_of
from tests.resume_points import memory_point

SYNC = StepSync(step=1, losses=[0.5], memory_copied=True)


class Rank:
    """A rank with ranks on other nodes, as far as its memory states need it."""

    def __init__(
        self,
        home: Path,
        *,
        point: ResumePoint | None = None,
        loaded: states.MemoryState | None = None,
        hang_timeout_s: float = 10.0,
        is_alone: bool = False,
        **changes: Any,
    ) -> None:
        spec = spec_of(home)
        checkpoint = spec.checkpoint.model_copy(update={"memory_every_steps": 1, **changes})
        launch = spec.launch.model_copy(update={"hang_timeout_s": hang_timeout_s})
        self.tracker = ReaderStateTracker(
            committed_step=0, step=0, groups=range(1), cursors=np.zeros((1, 1, 4), dtype=np.int64)
        )
        place = {"rank": 0, "world_size": 1, "ranks_here": 1, "first_rank_here": 0, "coordinate": ALL_SLOTS}
        node = {"mesh": DATA_PARALLEL, "is_first_of_node": True, "is_on_one_node": is_alone}
        self.communicator = communicator = SimpleNamespace(**place, **node, tree=RankTree(0, 1, None))
        self.warnings: list[str] = []
        self.model = torch.nn.Linear(25_000, 1, bias=False)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.engine = TorchState(model=self.model, optimizer=self.optimizer)
        self.saves = MemorySaves(
            spec.model_copy(update={"checkpoint": checkpoint, "launch": launch}),
            point or fresh_start(),
            cast(Any, communicator),
            self.tracker,
            cast(Any, SimpleNamespace(head=None, leg_json="", in_progress=list, gate=StepGate(self.engine))),
            self.warnings.append,
        )
        folder = states.memory_folder(spec)
        assert folder is not None
        self.folder = states.attempt_folder(folder, 3, "c")
        self.saves.begin(self.engine, loaded)

    def wait(self, *, is_asked: bool = False) -> float:
        """Wait for the copy of the last state after the next step, and return the seconds."""
        self.tracker.step += 1
        began = time.monotonic()
        self.saves.wait_for_copy(lambda: is_asked)
        self.tracker.step -= 1
        return time.monotonic() - began

    def step(self) -> list[int]:
        """Finish a step, keep a state if one may be kept, and return the steps of the states."""
        self.tracker.step += 1
        if self.saves.is_due(self.tracker.step):
            self.saves.save(self.engine, rows=0)
        return sorted(part.state.step for part in states.read_parts(self.folder.parent))

    @property
    def report(self) -> RankReport:
        """What the rank reports of its states."""
        return self.saves.report(RankReport())


@pytest.fixture
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The memory of a node, whose supervisor has started ranks."""
    monkeypatch.setenv(LAUNCH_VARIABLE, str(tmp_path))
    return tmp_path / "memory"


@pytest.fixture
def rank(memory: Path) -> Rank:
    """A rank that may keep a state of each step."""
    return Rank(memory)


def test_state_waits_for_copies_of_all(rank: Rank) -> None:
    """The rank reports the copy of its node, and keeps another state once all have reported their copies."""
    assert (rank.report.memory_copied, rank.step()) == (False, [1])
    states.mark_copied(rank.folder, 0, 0)
    assert not rank.report.memory_copied
    states.mark_copied(rank.folder, 0, 1)
    assert rank.report.memory_copied
    rank.saves.on_sync(replace(SYNC, memory_copied=False))
    assert rank.step() == [1]
    rank.saves.on_sync(SYNC)
    assert rank.step() == [1, 3]
    assert not rank.report.memory_copied
    assert rank.step() == [1, 3], "the message was about the state before"
    rank.saves.on_sync(SYNC)
    assert rank.step() == [3, 5]


def test_lower_of_two_costs_sets_the_pace(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A state is saved in each step until two have shown their cost, which has no work of the script, and after a late copy."""
    rank, now, costs = Rank(memory, memory_every_steps=0), [0.0], iter((5.0, 7.0, 1.0, 9.0))
    monkeypatch.setattr("dlac_pipeline.memory_states.save.time.monotonic", lambda: now[0])

    def take_time(*_: object) -> None:
        now[0] += next(costs)

    monkeypatch.setattr(rank.engine, "save", take_time)
    for step in range(4, 8):
        now[0] += 50.0
        rank.saves.step_done()
        rank.saves.return_to_script()
        now[0] += 50.0
        assert rank.saves.is_due(step)
        rank.saves.save(rank.engine, rows=8)
        rank.saves.on_sync(SYNC)
    assert rank.report.memory_steps == math.ceil(1.0 * 199 / 100.0), "half a percent of the time"
    assert not rank.saves.is_due(8)
    rank.saves.on_sync(replace(SYNC, memory_steps=3, memory_copied=False))
    assert [rank.saves.is_due(step) for step in range(2, 7)] == [False, True, False, False, True]
    rank.saves.on_sync(replace(SYNC, memory_steps=3))
    assert [rank.saves.is_due(step) for step in range(2, 5)] == [False, True, True], "the late copy is done"
    rank.saves.pause()
    assert [rank.saves.is_due(step) for step in range(1, 4)] == [False, True, True], "a checkpoint was taken"


@pytest.fixture
def training(memory: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A rank without other nodes, which trains while its small state is copied slowly."""
    monkeypatch.setattr("dlac_pipeline.memory_states.save._LEAST_BESIDE_BYTES", 1)
    monkeypatch.setattr("dlac_pipeline.checkpoint.step_gate._LEAST_BYTES", 1)
    overwrite = MemoryFile.overwrite

    def slowly(*arguments: Any) -> int:
        time.sleep(0.05)
        return overwrite(*arguments)

    rank = Rank(memory, is_alone=True)
    rank.model.weight.grad = torch.ones_like(rank.model.weight)
    rank.step()
    rank.optimizer.step()
    monkeypatch.setattr(MemoryFile, "overwrite", slowly)
    return rank


def sync(rank: Rank) -> None:
    """End a step, and receive the message of all ranks about it."""
    rank.saves.step_done()
    rank.saves.on_sync(replace(SYNC, memory_copied=rank.report.memory_copied, memory_failed=rank.report.memory_failed))


def test_state_is_copied_beside_training(training: Rank) -> None:
    """The next step of the optimizer waits for the copy, so that the state has the weights from before it."""
    for step in (2, 3, 4):
        sync(training)
        before = training.model.weight.detach().clone()
        assert step not in training.step()
        training.optimizer.step()
        sync(training)
        (state,) = (each for each in states.read_states(training.folder.parent) if each.first.step == step)
        assert torch.equal(torch.load(state.folder / "torch-state.pt")["model"]["weight"], before)


def test_changed_state_is_left_out(training: Rank) -> None:
    """Weights that change before the optimizer's step leave their state without a seal. The state before it stays whole."""
    sync(training)
    training.step()
    training.model.weight.data.zero_()
    training.optimizer.step()
    sync(training)
    assert "'model.weight'" in training.warnings[0]
    assert [each.first.step for each in states.read_states(training.folder.parent)] == [1]
    assert training.step() == [1, 3], "its slot is written again, at once"
    sync(training)
    assert training.step() == [3, 4]


@pytest.mark.parametrize("failure", [OSError("no space"), RuntimeError("no space"), MemoryError("no space")])
@pytest.mark.parametrize("place", [(MemoryFile, "overwrite"), (CopyMemory, "copy_of")])
def test_failure_beside_training_is_reported(
    training: Rank, monkeypatch: pytest.MonkeyPatch, place: tuple[type, str], failure: Exception
) -> None:
    """Memory that is full while a state is copied is reported after the step, also where PyTorch allocates it."""

    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(*place, fail)
    sync(training)
    training.step()
    training.optimizer.step()
    sync(training)
    assert "no space" in training.warnings[0]
    assert not training.folder.exists()
    monkeypatch.setattr(training.saves, "_finish_copy", fail)
    training.saves.close()  # only logs, because the rank has more to close


def test_slower_step_is_a_cost(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step beside a copy that took 3 seconds counts as longer than others by these at the most."""
    rank, now, copied = Rank(memory, memory_every_steps=0), [0.0], [0.0]
    monkeypatch.setattr("dlac_pipeline.memory_states.save.time.monotonic", lambda: now[0])
    monkeypatch.setattr(rank.saves, "_finish_copy", lambda: copied[0])
    for seconds in (50.0, 50.0, 52.0):
        now[0] += seconds
        rank.saves.step_done()
        rank.saves.save(rank.engine, rows=8)
        rank.saves.on_sync(SYNC)
    now[0], copied[0] = now[0] + 60.0, 3.0
    rank.saves.step_done()
    assert list(rank.saves._pace.costs) == [3.0]


def test_uncopied_states_are_kept_alone(rank: Rank) -> None:
    """A node that cannot copy warns once, and its ranks wait for it no more."""
    rank.step()
    states.mark_copied(rank.folder, 0, states.ALWAYS)
    for step in (2, 3):
        assert rank.report.memory_copied
        rank.saves.on_sync(SYNC)
        assert rank.step() == [step - 1, step]


@pytest.mark.parametrize("loads_own_files", [True, False])
def test_seal_has_flag_of_engine(rank: Rank, loads_own_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors, which load no engine, read from the seal which files the ranks of a node need."""
    monkeypatch.setattr(TorchState, "loads_own_files", loads_own_files)
    rank.step()
    assert [part.state.loads_own_files for part in states.read_parts(rank.folder.parent)] == [loads_own_files]


def test_rank_waits_for_copy(memory: Path) -> None:
    """It waits after a step at which another state is due, and after no other one."""
    rank = Rank(memory, memory_waits=True, memory_every_steps=2)
    assert rank.step() == [1]
    rank.tracker.step = 2
    assert rank.wait() < 1
    rank.tracker.step = 1
    threading.Timer(0.3, states.mark_copied, (rank.folder, 0, 1)).start()
    assert 0.2 < rank.wait() < 4
    assert rank.report.memory_copied


def test_wait_for_copy_ends(memory: Path) -> None:
    """A stop request ends it. So does its limit: the rank trains on, leaves the state out, and waits for no copy twice."""
    rank = Rank(memory, memory_waits=True, memory_every_steps=2)
    rank.step()
    assert rank.wait(is_asked=True) < 1
    rank = Rank(memory, memory_waits=True, memory_every_steps=2, hang_timeout_s=2.0)
    rank.step()
    assert 1 <= rank.wait() < 4
    assert rank.step() == [1]
    rank.tracker.step = 1
    assert rank.wait() < 1


def test_all_ranks_wait_as_rank_0(memory: Path) -> None:
    """Nodes may have different settings. If they disagreed, one would wait in a message that another does not send."""
    rank = Rank(memory, memory_waits=True)
    rank.communicator.tree.broadcast = lambda content: b"3 0 "
    rank.saves.begin(rank.engine, None)
    rank.step()
    assert [rank.saves.is_due(step) for step in (2, 3)] == [False, True]
    rank.tracker.step = 2
    assert rank.wait() < 1


@pytest.mark.parametrize("missing", ["write", "room"])
def test_failed_state_has_no_seal(memory: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """Without memory for a second state its slot has no seal from the beginning, and no rank of the node waits for a copy."""
    rank = Rank(memory, memory_waits=True)
    rank.step()
    rank.saves.on_sync(SYNC)

    def fail(*_: object) -> int:
        raise OSError("no space")

    if missing == "write":
        monkeypatch.setattr(MemoryFile, "overwrite", fail)
    else:
        monkeypatch.setattr(states, "room_for_states", lambda memory: -1)
    assert rank.step() == [1]
    assert rank.report.memory_failed
    assert rank.wait() < 1
    assert states.copied_step(rank.folder, 0) == states.ALWAYS


def test_failure_of_any_rank_frees_memory(rank: Rank) -> None:
    """A rank on another node cannot keep states: this node keeps none any more, and warns."""
    rank.step()
    rank.saves.on_sync(replace(SYNC, memory_failed=True))
    assert not rank.folder.exists()
    assert rank.step() == []
    assert len(rank.warnings) == 1


def test_fetched_state_is_freed(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have loaded it. If a node has no room for new states, the old ones are removed as well."""
    folder = states.memory_folder(spec_of(memory))
    assert folder is not None
    keep(folder, part_of(0))
    (kept,) = states.read_parts(folder)
    loaded = states.MemoryState(states.slot_at(folder, kept.slot), ())
    fetched = states.fetched_folder(folder / "000003-c", 0)
    fetched.mkdir(parents=True)
    Rank(memory, point=memory_point(), loaded=loaded)
    assert not fetched.exists()
    assert len(states.read_parts(folder)) == 1
    monkeypatch.setattr(states, "room_for_states", lambda memory: -1)
    Rank(memory, loaded=loaded)
    assert states.read_parts(folder) == []


@pytest.mark.parametrize(
    ("failure", "stays"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:1"), True),
        (OSError(28, "No space left on device"), True),
        (ValueError("invalid header"), False),
        (MemoryStateLost("another attempt wrote it"), False),
    ],
    ids=["peer", "no room", "content", "changed"],
)
def test_lost_peer_leaves_states(tmp_path: Path, failure: Exception, stays: bool) -> None:
    """A rank that dies while all load is not the state's fault."""
    folder = tmp_path / OWN / "mine"
    keep(folder, replace(part_of(0), world_size=1))
    (state,) = states.read_states(folder)
    with pytest.raises(type(failure) if stays else MemoryStateLost), lose_if_unreadable(state):
        raise failure
    assert bool(states.read_states(folder)) == stays


def test_state_of_replays_is_lost(tmp_path: Path) -> None:
    """A state after the last step of the order is of replays, and does not fit an attempt without them."""
    folder = tmp_path / OWN / "mine"
    keep(folder, part_of(0, world_size=1))
    (state,) = states.read_states(folder)
    point = memory_point(step=13, head_step=10, folder=str(state.folder))
    facts = {"counted": True, "reader_state": lambda step: [], "settings": SimpleNamespace(key_groups=1), "sources": []}
    ends, replays = (SimpleNamespace(**facts, total_steps=last) for last in (13, 12))
    assert read_memory(point, cast(LegOrder, ends), replays=False) is not None
    assert read_memory(point, cast(LegOrder, replays)) is not None
    with pytest.raises(MemoryStateLost, match="found step 13"):
        read_memory(point, cast(LegOrder, replays), replays=False)
