from __future__ import annotations

from typing import TYPE_CHECKING, Any

from catalog.branches import rewind
from catalog.ledger import Ledger
from dlac_pipeline.recover.live_status import LiveStatus
from dlac_pipeline.recover.status import run_status

if TYPE_CHECKING:
    import pytest

    from tests.conftest import Arena

SAME = ("run", "state", "step", "loss", "consumed_share", "at_risk_steps", "attempt", "attempts_without_progress")


def test_a_status_that_follows_a_run_says_what_a_new_one_says(arena: Arena) -> None:
    """It asks for new rows only: behind commits, another attempt, a rewind and the end of the run."""
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
    target = ledger.restorable("r", 5)["checkpoint_id"]
    rewind(ledger, "r", nonce="n", checkpoint_id=target, detail={})
    assert agree(status)["step"] == 5
    arena.train(spec)
    assert (agree(status)["state"], status.finished) == ("finished", True)
    last = max(int(row["seq"]) for row in arena.rows("r"))
    assert [row["kind"] for row in ledger.rows("r", after=last - 1)] == ["finish"]
    assert ledger.rows("r", after=last) == []


def test_a_checkpoint_that_is_committed_meanwhile_is_no_step_0(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said of a run at one time agrees with itself, however busy the run is."""
    arena.table(appends=(500,))
    spec = arena.spec("r", world_size=1, passes=1, every_steps=5)
    arena.train(spec, until=7)
    original = Ledger.head_rows

    def read(*args: Any) -> Any:
        found = original(*args)
        monkeypatch.setattr(Ledger, "head_rows", original)
        arena.train(spec, until=12)
        return found

    monkeypatch.setattr(Ledger, "head_rows", read)
    status = run_status(arena.lakehouse, "r")
    steps = {row["checkpoint_id"]: row["step"] for row in arena.rows("r", "checkpoint")}
    assert (status["step"], steps[status["head_checkpoint"]]) == (5, 5)
    assert run_status(arena.lakehouse, "r")["step"] == 10
