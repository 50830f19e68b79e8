"""A rank keeps another state only when all ranks know that the one before is whole and copied."""

from __future__ import annotations

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
from dlac_pipeline.checkpoint.step_sync import RankReport, StepSync
from dlac_pipeline.elastic.ranks.rank import LAUNCH_VARIABLE
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.save import MemorySaves
from dlac_pipeline.plan.slots import ALL_SLOTS
from dlac_pipeline.track.tracker import ReaderStateTracker
from tests.memory_states import fresh_start, spec_of

SYNC = StepSync(step=1, losses=[0.5], memory_copied=True)


class Rank:
    """A rank with ranks on other nodes, as far as its memory states need it."""

    def __init__(self, home: Path, **changes: Any) -> None:
        spec = spec_of(home)
        checkpoint = spec.checkpoint.model_copy(update={"memory_every_steps": 1, **changes})
        self.tracker = ReaderStateTracker(
            committed_step=0, step=0, groups=range(1), cursors=np.zeros((1, 1, 4), dtype=np.int64)
        )
        self.communicator = communicator = SimpleNamespace(
            rank=0,
            world_size=1,
            ranks_here=1,
            first_rank_here=0,
            coordinate=ALL_SLOTS,
            is_first_of_node=True,
            is_on_one_node=False,
            tree=RankTree(0, 1, None),
        )
        self.warnings: list[str] = []
        self.engine = TorchState(model=torch.nn.Linear(2, 1))
        self.saves = MemorySaves(
            spec.model_copy(update={"checkpoint": checkpoint}),
            fresh_start(),
            cast(Any, communicator),
            self.tracker,
            cast(Any, SimpleNamespace(head=None, in_progress=list)),
            self.warnings.append,
        )
        folder = states.memory_folder(spec)
        assert folder is not None
        self.folder = states.attempt_folder(folder, 3, "c")
        self.saves.begin(self.engine, None)

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
    def is_copied(self) -> bool:
        """What the rank reports of its last state."""
        return self.saves.report(RankReport()).memory_copied


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A rank that a supervisor has started."""
    monkeypatch.setenv(LAUNCH_VARIABLE, str(tmp_path))
    return Rank(tmp_path / "memory")


def test_state_waits_for_copies_of_all(rank: Rank) -> None:
    """The rank reports the copy of its node, and keeps another state once all have reported their copies."""
    assert (rank.is_copied, rank.step()) == (False, [1])
    states.mark_copied(rank.folder, 0, 0)
    assert not rank.is_copied
    states.mark_copied(rank.folder, 0, 1)
    assert rank.is_copied
    rank.saves.on_sync(replace(SYNC, memory_copied=False))
    assert rank.step() == [1]
    rank.saves.on_sync(SYNC)
    assert rank.step() == [1, 3]
    assert not rank.is_copied
    assert rank.step() == [1, 3], "the message was about the state before"
    rank.saves.on_sync(SYNC)
    assert rank.step() == [3, 5]


def test_uncopied_states_are_kept_alone(rank: Rank) -> None:
    """A node that cannot copy warns once, and its ranks wait for it no more."""
    rank.step()
    states.mark_copied(rank.folder, 0, states.ALWAYS)
    for step in (2, 3):
        assert rank.is_copied
        rank.saves.on_sync(SYNC)
        assert rank.step() == [step - 1, step]


@pytest.mark.parametrize("loads_own_files", [True, False])
def test_seal_has_flag_of_engine(rank: Rank, loads_own_files: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors, which load no engine, read from the seal which files the ranks of a node need."""
    monkeypatch.setattr(TorchState, "loads_own_files", loads_own_files)
    rank.step()
    assert [part.state.loads_own_files for part in states.read_parts(rank.folder.parent)] == [loads_own_files]


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    """A rank with `memory_waits` that has kept its first state, of step 1."""
    monkeypatch.setenv(LAUNCH_VARIABLE, str(tmp_path))
    rank = Rank(tmp_path / "memory", memory_waits=True, memory_every_steps=2)
    monkeypatch.setattr(rank.saves, "_longest_wait_s", 5.0)
    assert rank.step() == [1]
    return rank


def test_rank_waits_for_copy(waiting: Rank) -> None:
    """It waits after a step at which another state is due, and after no other one."""
    waiting.tracker.step = 2
    assert waiting.wait() < 1
    waiting.tracker.step = 1
    threading.Timer(0.3, states.mark_copied, (waiting.folder, 0, 1)).start()
    assert 0.2 < waiting.wait() < 4
    assert waiting.is_copied


def test_wait_for_copy_ends(waiting: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stop request and a failure end it. So does its limit: the rank trains on, and leaves the state out."""
    assert waiting.wait(is_asked=True) < 1
    monkeypatch.setattr(waiting.saves, "_longest_wait_s", 0.2)
    waiting.saves._waited_for = 0
    assert 0.2 <= waiting.wait() < 4
    assert waiting.step() == [1]
    monkeypatch.setattr(waiting.saves, "_longest_wait_s", 5.0)
    waiting.tracker.step = 1
    assert waiting.wait() < 1, "no copy is waited for twice"
    waiting.saves._waited_for = 0
    waiting.saves._give_up(states.slot_of(waiting.folder, 1), OSError("no room"))
    assert waiting.wait() < 1
    assert states.copied_step(waiting.folder, 0) == states.ALWAYS, "the other ranks of the node wait no more"


def test_all_ranks_wait_as_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes may have different settings. If they disagreed, one would wait in a message that another does not send."""
    monkeypatch.setenv(LAUNCH_VARIABLE, str(tmp_path))
    rank = Rank(tmp_path / "memory", memory_waits=True)
    rank.communicator.tree.broadcast = lambda content: b"3 0 "
    rank.saves.begin(rank.engine, None)
    assert (rank.saves._fixed, rank.saves._waits) == (3, False)


def test_failure_of_any_rank_frees_memory(rank: Rank) -> None:
    """A rank on another node cannot keep states: this node keeps none any more, and warns."""
    rank.step()
    rank.saves.on_sync(replace(SYNC, memory_failed=True))
    assert not rank.folder.exists()
    assert rank.step() == []
    assert len(rank.warnings) == 1


def test_warning_of_small_memory_has_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container has little shared memory: the warning names the remedy."""
    monkeypatch.setenv(LAUNCH_VARIABLE, str(tmp_path))
    monkeypatch.setattr(states, "room_for_states", lambda memory: 0)
    (warning,) = Rank(tmp_path / "memory").warnings
    assert '--shm-size, free memory of the node, or set checkpoint.memory = ""' in warning
