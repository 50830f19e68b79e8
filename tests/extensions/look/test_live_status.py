import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.extensions.branches.appends import commit_rewind
from dlac_pipeline.extensions.look.live_status import LiveStatus
from dlac_pipeline.extensions.look.run_state import run_status
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase, Spent
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from tests.conftest import Arena

SAME = ("run", "state", "step", "loss", "consumed_share", "at_risk_steps", "attempt", "attempts_without_progress")


def test_following_status_equals_new_one(arena: Arena) -> None:
    """It reads new rows only: after commits, another attempt, a rewind and the end of the run."""
    arena.table(appends=(500,))
    spec = arena.spec("r", world_size=1, passes=1, every_steps=5)
    ledger = Ledger(arena.lakehouse)

    def agree(status: LiveStatus) -> dict[str, object]:
        known, fresh = status.look(), LiveStatus(arena.lakehouse, "r").look()
        assert {name: known[name] for name in SAME} == {name: fresh[name] for name in SAME}
        return known

    arena.train(spec, until=7)
    status = LiveStatus(arena.lakehouse, "r")
    assert agree(status)["step"] == 5
    arena.train(spec, until=12)
    assert agree(status)["step"] == 10
    commit_rewind(ledger, "r", nonce="n", checkpoint_id=ledger.restorable("r", 5).checkpoint_id)
    assert agree(status)["step"] == 5
    arena.train(spec)
    assert (agree(status)["state"], status.finished) == ("finished", True)
    last = max(row.seq for row in arena.rows("r"))
    assert [row.kind for row in ledger.rows("r", after=last - 1)] == ["finish"]
    assert ledger.rows("r", after=last) == []


def test_concurrent_checkpoint_is_not_step_zero(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A status at one time is consistent, however busy the run is."""
    arena.table(appends=(500,))
    spec = arena.trained("r", world_size=1, passes=1, every_steps=5, until=7)
    original = Ledger.head_rows

    def read(*args: Any) -> Any:
        found = original(*args)
        monkeypatch.setattr(Ledger, "head_rows", original)
        arena.train(spec, until=12)
        return found

    monkeypatch.setattr(Ledger, "head_rows", read)
    status = run_status(arena.lakehouse, "r")
    steps = {row.checkpoint_id: row.step for row in arena.rows("r", CheckpointRow)}
    assert (status["step"], steps[status["head_checkpoint"]]) == (5, 5)
    assert run_status(arena.lakehouse, "r")["step"] == 10


@pytest.mark.parametrize(("memory_step", "at_risk_s"), [(5, 400), (6, 1400)])
def test_risk_begins_with_what_is_uncommitted(arena: Arena, tmp_path: Path, memory_step: int, at_risk_s: float) -> None:
    """The risk begins at the head if the attempt resumed from later steps in memory. Else it begins with the attempt."""
    with claimed_again(arena, tmp_path, memory_of=int(memory_step > 0), memory_step=memory_step) as folder:
        began = arena.rows("r", CheckpointRow)[-1].committed_at.timestamp() + 1000
        with arena.monkeypatch.context() as patched:
            patched.setattr(time, "time", lambda: began + 400)
            HeartbeatFile(folder, 0).write(7, Phase.TRAINING, spent=Spent(in_hand=8, rows=64, began=began))
            assert LiveStatus(arena.lakehouse, "r").look()["at_risk_s"] == pytest.approx(at_risk_s, abs=1)


def test_rows_past_pass_count_for_next(arena: Arena, tmp_path: Path) -> None:
    """Also before a checkpoint of it is committed. The first finished step begins the rate, not the start of the attempt."""
    rates = []
    with claimed_again(arena, tmp_path) as folder:
        status = LiveStatus(arena.lakehouse, "r")
        for rows, share in ((0, 160 / 500), (340, 1.0), (400, 60 / 500)):
            HeartbeatFile(folder, 0).write(5 + rows // 32, Phase.TRAINING, spent=Spent(rows=rows))
            facts = status.look()
            assert facts["consumed_share"] == share
            rates.append(facts["samples_per_s"])
    assert rates[:2] == [None, None]
    assert rates[2] is not None


@contextmanager
def claimed_again(arena: Arena, folder: Path, **named: int) -> Iterator[Path]:
    """The launch folder of an attempt after step 5, without ranks. `named` are fields of its claim."""
    arena.table(appends=(500,))
    spec = arena.trained("r", world_size=1, passes=2, every_steps=5, until=7)
    with run_lock(spec.checkpoint.local, "r", wait_s=0, takeover=False):
        request = ClaimRequest(nonce="n", launch_folder=str(folder), purpose=named)
        start_attempt(Plans(arena.lakehouse), spec, request)
        yield folder
