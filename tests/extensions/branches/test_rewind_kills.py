"""Kills after a rewind, in its first steps and in its first commit, while a zombie of the old branch exists."""

import signal

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.branches.rewind import rewind_run
from tests.conftest import Arena
from tests.extensions.branches.test_rewind import recorded
from tests.faults.test_zombie import check_refused, freeze


@pytest.mark.soak
@pytest.mark.parametrize("moment", ["before", "after"])
def test_kill_after_rewind(campaign: Arena, moment: str) -> None:
    """The run stays on the new branch after a kill at any time. Both branches match the journal. The zombie never commits."""
    run = f"rewound-{moment}"
    spec = campaign.spec(run, pause_s=0.02, passes=1)
    zombie = campaign.launch(spec)
    zombie.wait_for("checkpoint", 3)
    ranks = freeze(zombie)
    left, old_losses = campaign.head(run), campaign.losses(run)
    assert left is not None
    done = rewind_run(campaign.lakehouse, run, nonce="op", target=10, exclude=["row_id >= 1000"])
    assert done.left == left
    early = campaign.launch(spec, takeover=True)
    early.wait_for("training")
    early.destroy()
    assert campaign.head(run) == done.checkpoint_id
    sabotaged = {"SABOTAGE": f"kill-{moment}-commit@20", "SABOTAGED_ATTEMPT": "4"}
    late = campaign.launched(campaign.spec(run, "train_sabotaged.py", env=sabotaged, passes=1), takeover=True)
    first, second = late.of("attempt")
    assert (first["attempt"], first["step"], second["step"]) == (4, 10, 20 if moment == "after" else 10)
    before = campaign.rows(run)
    zombie.signal_all(signal.SIGCONT)
    check_refused(zombie, ranks)
    assert campaign.rows(run) == before
    assert campaign.losses(run)[:10] == old_losses[:10] == campaign.losses("reference")[:10]
    old, new = campaign.journal(run, left), campaign.journal(run)
    assert {step: rows for step, rows in old.items() if step <= 10} == {s: new[s] for s in range(1, 11)}
    assert all(row < 1000 for step, rows in new.items() if step > 10 for row in rows)
    for head, journal in ((left, old), (None, new)):
        assert recorded(campaign, run, head) == sorted(row for rows in journal.values() for row in rows)
        report = audit_run(campaign.lakehouse, run, head)
        assert (report.exact, report.problems) == (True, ())
