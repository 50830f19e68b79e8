"""A rank keeps states in memory as often as the copies allow, seals whole ones only, and loses unloadable ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlac_pipeline.checkpoint.engines import TorchState
from dlac_pipeline.checkpoint.restore.resume_point import FreshStart
from dlac_pipeline.checkpoint.step_sync import RankReport, StepSync
from dlac_pipeline.elastic.ranks.rank import LAUNCH_VARIABLE
from dlac_pipeline.lakehouse.errors import MemoryStateLost
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.memory_file import MemoryFile
from dlac_pipeline.memory_states.save import MOST_OVERHEAD, MemorySaves, bytes_of_state
from dlac_pipeline.plan.slots import ALL_SLOTS
from dlac_pipeline.train.restored_state import lose_if_unreadable, read_memory
from tests.memory_states import OWN, keep, part_of, spec_of
from tests.resume_points import memory_point


class _Engine:
    name, writes_itself = "torch", False

    def save(self, folder: Path, write: Callable[[Path, Any], None]) -> None:
        """Save one tensor."""
        write(folder / "state.pt", {"weight": torch.zeros(3)})


def tree_of(fixed: int) -> Any:
    """Return the tree of a rank whose rank 0 has another setting."""
    return SimpleNamespace(
        lowest=lambda payload: payload, broadcast=lambda payload: payload.replace(b"0 ", b"%d " % fixed, 1)
    )


def saves_of(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    fixed: int = 0,
    memory_of: int = 0,
    loaded: states.MemoryState | None = None,
) -> MemorySaves:
    """Return the states of a rank on one of two nodes, after `begin`."""
    monkeypatch.setenv(LAUNCH_VARIABLE, str(folder))
    tracker: Any = SimpleNamespace(
        cursors=None, groups=[0], step=4, committed_step=0, losses=[], skipped=[], advances=lambda: {}
    )
    point = memory_point() if memory_of else FreshStart(attempt=3, nonce="c", leg="{}", leg_is_new=False)
    manager: Any = SimpleNamespace(in_progress=list, head=None)
    communicator: Any = SimpleNamespace(
        rank=0,
        world_size=2,
        is_on_one_node=False,
        is_first_of_node=True,
        first_rank_here=0,
        coordinate=ALL_SLOTS,
        ranks_here=1,
        tree=tree_of(fixed),
    )
    warnings: list[str] = []
    saves = MemorySaves(spec_of(folder), point, communicator, tracker, manager, warnings.append)
    saves.begin(_Engine(), loaded)  # type: ignore[arg-type]  # only what is used
    return saves


def sync(*, copied: bool) -> StepSync:
    """Return the message of a step."""
    return StepSync(step=4, losses=[0.5], memory_copied=copied)


def save(saves: MemorySaves) -> None:
    """Save a state of the tests' engine."""
    saves.save(_Engine(), rows=8)  # type: ignore[arg-type]  # only what is used


def test_first_states_wait_for_copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step asks for the copy of the state before. With a fixed number of steps every step does."""
    saves = saves_of(tmp_path, monkeypatch)
    assert saves.is_due(1)
    save(saves)
    assert not saves.is_due(2)
    saves.on_sync(sync(copied=True))
    assert saves.is_due(3)
    saves = saves_of(tmp_path, monkeypatch, fixed=2)
    save(saves)
    assert [saves.is_due(step) for step in (2, 3, 4)] == [True, False, True]


def test_two_costs_set_the_pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States are saved in each step until two have shown their cost. The lower one counts, as a machine has slow moments."""
    saves = saves_of(tmp_path, monkeypatch)
    moments = iter(range(100))
    monkeypatch.setattr("dlac_pipeline.memory_states.save.time.monotonic", lambda: float(next(moments)))
    for number, cost_s in enumerate((5, 7, 1, 9)):
        assert saves.is_due(4 + number)
        saves.step_done()
        for _ in range(cost_s - 1):
            next(moments)
        save(saves)
        saves.on_sync(sync(copied=True))
    saves._step_s = 100.0
    assert saves.report(RankReport()).memory_steps == math.ceil(1 / (MOST_OVERHEAD * 100.0))
    assert not saves.is_due(8)


def test_work_of_script_is_no_cost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script does between its step and the request for a batch, as an evaluation, belongs to the step's time."""
    saves, now = saves_of(tmp_path, monkeypatch), [0.0]
    monkeypatch.setattr("dlac_pipeline.memory_states.save.time.monotonic", lambda: now[0])
    engine = _Engine()

    def take_a_second(*arguments: Any) -> None:
        now[0] += 1.0

    monkeypatch.setattr(engine, "save", take_a_second)
    for _ in range(4):
        now[0] += 50.0
        saves.step_done()
        saves.return_to_script()
        now[0] += 50.0
        saves.save(engine, rows=8)  # type: ignore[arg-type]  # only what is used
        saves.on_sync(sync(copied=True))
    assert saves.report(RankReport()).memory_steps == math.ceil(1 / (MOST_OVERHEAD * 100.0))


def test_failed_state_has_no_seal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that cannot be written leaves the slot without a seal from the beginning."""
    saves = saves_of(tmp_path, monkeypatch)
    sealed: list[Path] = []

    def fail(*arguments: Any) -> int:
        raise OSError("no space")

    monkeypatch.setattr(MemoryFile, "overwrite", fail)
    monkeypatch.setattr(states, "write_seal", lambda slot, state: sealed.append(slot))
    saves._number = 1
    saves._copied = True
    monkeypatch.setattr(saves, "_check_room", fail)
    save(saves)
    assert sealed == []
    assert saves._failed


def test_fetched_state_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks have loaded it. If a node has no room for new states, the old ones are removed as well."""
    folder = states.memory_folder(spec_of(tmp_path))
    assert folder is not None
    keep(folder, part_of(0))
    (kept,) = states.read_parts(folder)
    loaded = states.MemoryState(states.slot_at(folder, kept.slot), ())
    fetched = states.fetched_folder(folder / "000003-c", 0)
    fetched.mkdir(parents=True)
    saves_of(tmp_path, monkeypatch, memory_of=2, loaded=loaded)
    assert not fetched.exists()
    assert len(states.read_parts(folder)) == 1
    monkeypatch.setattr(states, "room_for_states", lambda memory: -1)
    saves_of(tmp_path, monkeypatch, loaded=loaded)
    assert states.read_parts(folder) == []


def test_only_the_loaded_state_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory counts as free for new states, because it is removed after the first of them."""
    folder = states.memory_folder(spec_of(tmp_path))
    assert folder is not None
    for slot in ("0-000002-b", "1-000002-b"):
        (folder / "000002-b" / slot).mkdir(parents=True)
        (folder / "000002-b" / slot / "state.pt").write_bytes(bytes(3_000))
    loaded = states.MemoryState(folder / "000002-b" / "1-000002-b", ())
    monkeypatch.setattr(MemorySaves, "_state_here", lambda self, engine: 4_000)
    monkeypatch.setattr(states, "room_for_states", lambda memory: 5_000)
    saves = saves_of(tmp_path, monkeypatch, memory_of=2, loaded=loaded)
    assert saves._folder is not None
    assert [each.name for each in (folder / "000002-b").iterdir()] == ["1-000002-b"]
    monkeypatch.setattr(states, "room_for_states", lambda memory: 4_999)
    assert saves_of(tmp_path, monkeypatch, memory_of=2, loaded=loaded)._folder is None


def test_fetched_state_of_killed_attempt_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its supervisor was killed while its ranks loaded. What it had fetched takes no room from the states of the next attempt."""
    folder = states.memory_folder(spec_of(tmp_path))
    assert folder is not None
    fetched = states.fetched_folder(folder / "000002-b", 0)
    (fetched / "000001-a" / "0-000001-a").mkdir(parents=True)
    monkeypatch.setattr(MemorySaves, "_state_here", lambda self, engine: 4_000)
    monkeypatch.setattr(states, "room_for_states", lambda memory: 7_999 if fetched.exists() else 8_000)
    assert saves_of(tmp_path, monkeypatch)._folder is not None
    assert not fetched.exists()


def test_lost_state_names_what_to_do() -> None:
    """It could not be fetched, so it has no folder on this node."""
    order: Any = None
    with pytest.raises(MemoryStateLost, match=r"step 7 on this node, .*: start the run again"):
        read_memory(memory_point(folder=""), order)


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


def test_frozen_weights_need_no_optimizer_state() -> None:
    """The memory that a state needs is estimated: with adapters, most of a model's weights are frozen."""
    model = torch.nn.Sequential(torch.nn.Linear(10, 10, bias=False), torch.nn.Linear(10, 1, bias=False))
    model[0].requires_grad_(False)
    assert bytes_of_state(TorchState(model=model)) == (400 + 4 * 40, 0)
