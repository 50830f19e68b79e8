"""A memory state is taken only if it provably continues the head, for the attempt that replaces its attempt."""

import os
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlac_pipeline.lakehouse.ledger.run_rows import Fence, trained_by
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, LedgerRow
from dlac_pipeline.memory_states import states
from dlac_pipeline.memory_states.choose import MemoryChoice, may_resume
from dlac_pipeline.memory_states.states import MemoryState, Part, RankState, Trained
from dlac_pipeline.supervise.claims import attempts_without_progress
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase, Spent, may_have_died_loading
from tests.memory_states import STATE, trained

_HEAD = CheckpointRow(seq=2, attempt=1, nonce="a", checkpoint_id="c10", step=10)
_ROWS: list[LedgerRow] = [ClaimRow(seq=1, attempt=1, nonce="a"), _HEAD, ClaimRow(seq=3, attempt=2, nonce="b")]


def taken(state: RankState, rows: list[LedgerRow], head: CheckpointRow, replaced: int = 2) -> bool:
    """Return whether a state of one rank may be resumed from."""
    return may_resume(MemoryState(Path(), (state,)), rows, head, replaced=replaced, died_loading=may_have_died_loading)


def test_state_before_first_checkpoint_is_taken() -> None:
    """A state names its head. A run without a checkpoint has a state that names none."""
    assert taken(STATE, _ROWS, _HEAD)
    assert taken(replace(STATE, head=None, trained=[trained(0)]), _ROWS[::2], CheckpointRow())


def test_checkpoint_committed_meanwhile_is_continued() -> None:
    """The checkpoint in progress was committed after the state was kept: only the steps since count."""
    head = CheckpointRow(seq=4, attempt=2, nonce="b", checkpoint_id="c12", parent="c10", step=12)
    both = replace(STATE, trained=[Trained(since=10, losses=[0.1, 0.2], skipped=[11], advances=[]), trained(12)])
    assert taken(both, [*_ROWS, head], head)
    state = MemoryState(Path(), (both,))
    assert state.trained_since(12) == trained(12)
    assert state.trained_since(10) == Trained(since=10, losses=[0.1, 0.2, 0.5, 0.5, 0.5], skipped=[11], advances=[])
    assert state.trained_since(11) is None


def test_state_of_the_head_is_taken() -> None:
    """The checkpoint of the state's own step had begun when it was kept. One that began afterwards may have other weights."""
    head = CheckpointRow(seq=4, attempt=2, nonce="b", checkpoint_id="c13", parent="c10", step=13)
    nothing = Trained(since=13, losses=[], skipped=[], advances=[])
    kept = replace(STATE, trained=[trained(10), nothing])
    assert taken(kept, [*_ROWS, head], head)
    assert MemoryState(Path(), (kept,)).trained_since(13) == nothing
    assert not taken(STATE, [*_ROWS, head], head)
    assert not taken(kept, [*_ROWS, head], replace(head, attempt=1, nonce="a"))


def test_state_is_taken_twice() -> None:
    """An attempt that resumed from memory died on another node, before it kept a state: the state may be to blame."""
    claim = ClaimRow(seq=4, attempt=3, nonce="c", memory_of=2, memory_step=13, memory_at=5.0)
    assert taken(STATE, [*_ROWS, claim], _HEAD, replaced=3)
    assert not taken(replace(STATE, step=14, saved_at=6.0), [*_ROWS, claim], _HEAD, replaced=3)
    assert not taken(STATE, [*_ROWS, claim, replace(claim, seq=5, attempt=4, nonce="d")], _HEAD, replaced=4)


def test_only_death_in_load_counts(tmp_path: Path) -> None:
    """Attempts whose ranks died before the load or after it leave the state to the next one. Two that died in it do not."""
    claims: list[LedgerRow] = []
    phases = [(Phase.STARTING, 0), (Phase.LOADING, 5), (Phase.TRAINING, 5), (Phase.LOADING, 0), (Phase.LOADING, 0)]
    expected = [True, True, True, True, False]
    for number, (phase, loading_us) in enumerate(phases, start=3):
        (folder := tmp_path / f"launch-{number}").mkdir()
        with closing(HeartbeatFile(folder, 0)) as file:
            file.write(13, phase, spent=Spent(loading_us=loading_us))
        named: dict[str, Any] = {"memory_of": 2, "memory_step": 13, "memory_at": 5.0, "launch_folder": str(folder)}
        claims.append(ClaimRow(seq=number + 1, attempt=number, nonce=f"c{number}", **named))
        assert taken(STATE, [*_ROWS, *claims], _HEAD, replaced=number) == expected[number - 3]


def test_claimed_state_is_the_very_one() -> None:
    """A fenced attempt has written another state of the same step: the claim names the earlier one, also if it is lost."""
    claim = ClaimRow(seq=4, attempt=3, nonce="c", memory_of=2, memory_step=13, memory_at=5.0)
    ledger: Any = SimpleNamespace(rows=lambda run, *, kinds: [*_ROWS, claim])
    fence = Fence(attempt=3, nonce="c", seq=4, head="c10")
    named, later = (MemoryState(Path(), (replace(STATE, saved_at=at),)) for at in (5.0, 6.0))
    for states_found, expected in (([], None), ([later], None), ([later, named], named)):
        choice = MemoryChoice(run="r", ledger=ledger, replaced=2, find=partial(list, states_found), died_loading=bool)
        claimed = choice.find_claimed(fence, leg="{}")
        assert claimed is not None
        assert (claimed.claim, claimed.state) == (claim, expected)


@pytest.mark.parametrize(
    ("state", "rows", "head", "replaced"),
    [
        pytest.param(replace(STATE, attempt=1, nonce="a"), _ROWS, _HEAD, 2, id="of an older attempt"),
        pytest.param(replace(STATE, nonce="z"), _ROWS, _HEAD, 2, id="of another launch with the same number"),
        pytest.param(replace(STATE, head="c09"), _ROWS, _HEAD, 2, id="of another branch"),
        pytest.param(replace(STATE, step=9), _ROWS, _HEAD, 2, id="older than the head"),
        pytest.param(replace(STATE, trained=[trained(11)]), _ROWS, _HEAD, 2, id="without a step since the head"),
        pytest.param(
            STATE, [*_ROWS, ClaimRow(seq=4, attempt=3, nonce="c", purpose="rewinds", memory_of=2)], _HEAD, 3, id="before a rewind"
        ),
        pytest.param(STATE, [*_ROWS, ClaimRow(seq=4, attempt=3, nonce="c")], _HEAD, 3, id="before one that read the store"),
    ],
)  # fmt: skip
def test_other_states_are_left(state: RankState, rows: list[LedgerRow], head: CheckpointRow, replaced: int) -> None:
    """Each differs in one thing from a state that is taken."""
    assert not taken(state, rows, head, replaced)


def test_state_is_whole_or_none(tmp_path: Path) -> None:
    """All ranks must have sealed the same step, and their files must have their size."""
    folder = tmp_path / f"dlac-{os.getuid()}" / "run"
    attempt = states.attempt_folder(folder, 2, "b")
    states.make_folder(attempt)
    slot = states.slot_of(attempt, 0)
    slot.mkdir()
    (slot / "a.pt").write_bytes(b"abc")
    first, second = (replace(STATE, world_size=2, rank=rank) for rank in range(2))
    states.write_seal(slot, first)
    assert states.read_slot(slot) is None
    states.write_seal(slot, replace(second, step=12))
    assert states.read_slot(slot) is None
    states.write_seal(slot, second)
    state = states.read_slot(slot)
    assert state == MemoryState(slot, (first, second))
    assert states.read_states(folder) == [state]
    assert states.check_unchanged(state)
    states.write_seal(slot, replace(second, saved_at=6.0))
    assert not states.check_unchanged(state), "another state of the same step"
    (slot / "a.pt").write_bytes(b"abcd")
    assert not states.check_unchanged(state)
    states.seal_file(slot, 0).write_bytes(b"\xc1")
    assert states.read_states(folder) == []


def test_state_in_memory_is_progress() -> None:
    """Attempts that die before a checkpoint count, but not those whose state a later one resumed from."""
    claims: list[LedgerRow] = [
        ClaimRow(seq=1, attempt=1),
        ClaimRow(seq=2, attempt=2),
        ClaimRow(seq=3, attempt=3, memory_of=2, memory_step=5),
        ClaimRow(seq=4, attempt=4, memory_of=2, memory_step=5),
    ]
    assert [attempts_without_progress(claims[:count]) for count in range(5)] == [0, 1, 2, 1, 2]
    assert [trained_by(claims, 4, step) for step in (5, 6)] == [2, 4]


def test_newest_state_has_latest_step(tmp_path: Path) -> None:
    """The clocks of nodes differ: the step decides."""
    found = [replace(STATE, step=14, saved_at=4.0), STATE]
    parts = [Part(f"000002-b/{number}-000002-b", replace(each, files=[])) for number, each in enumerate(found)]
    assert [state.first.step for state in states.find_states(tmp_path, reversed(parts))] == [14, 13]
