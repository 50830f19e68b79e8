from __future__ import annotations

from typing import TYPE_CHECKING

from catalog.branches import rewind
from catalog.ledger import Ledger
from dlac_pipeline.recover.live_status import LiveStatus

if TYPE_CHECKING:
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
