from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.faults.undisturbed import check_finished

if TYPE_CHECKING:
    from tests.conftest import Arena


@pytest.mark.soak
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.parametrize(("moment", "resumed_at"), [("after", 20), ("before", 10)])
def test_coordinator_killed_around_commit(campaign: Arena, moment: str, resumed_at: int, mode: str) -> None:
    """The old head stays until the commit, and the new one is the head after it, although training may have continued."""
    run = f"coordinator-killed-{moment}-{mode}"
    sabotage = {"SABOTAGE": f"kill-{moment}-commit@20"}
    pause_s = 0.02 if mode == "asynchronous" else 0.0
    launch = campaign.launch(
        campaign.spec(run, "train_sabotaged.py", env=sabotage, passes=1, mode=mode, pause_s=pause_s)
    )
    check_finished(campaign, run, launch)
    first, second = launch.of("attempt")
    assert (first["step"], second["step"]) == (0, resumed_at)
    assert "SIGKILL" in launch.of("failure")[0]["cause"]
