from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.mark.soak
@pytest.mark.parametrize(("moment", "resumed_at"), [("after", 20), ("before", 10)])
def test_coordinator_killed_around_commit(campaign: Arena, moment: str, resumed_at: int) -> None:
    """The old head stays until the commit, and the new one is the head after it. There is no state in between."""
    run = f"coordinator-killed-{moment}"
    spec = campaign.spec(run, "train_sabotaged.py", env={"SABOTAGE": f"kill-{moment}-commit@20"}, passes=1)
    launch = campaign.launch(spec)
    assert launch.wait() == 0, launch.stderr
    first, second = launch.of("attempt")
    assert (first["step"], second["step"]) == (0, resumed_at)
    assert "SIGKILL" in launch.of("failure")[0]["cause"]
    assert [row.step for row in campaign.lineage(run)] == [10, 20, 30, 40, 50, 60, 63]
    assert len(campaign.rows(run, CheckpointRow)) == 7
    reference = campaign.journal("reference")
    journal = campaign.journal(run)
    assert {step: journal[step] for step in range(1, 63)} == {step: reference[step] for step in range(1, 63)}
    assert sorted(row for rows in journal.values() for row in rows) == list(range(2000))
    assert campaign.losses(run)[:62] == campaign.losses("reference")[:62]
