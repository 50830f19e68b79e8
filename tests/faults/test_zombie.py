import signal
from typing import Any

import psutil
import pytest

from dlac_pipeline.lakehouse.ledger.typed_rows import FinishRow, LedgerRow, RetireRow
from tests.conftest import Arena, Launch
from tests.faults.test_preemption import check_gone
from tests.faults.undisturbed import STEPS, check_rows_of_a_pass


def freeze(launch: Launch) -> list[psutil.Process]:
    """Suspend a whole attempt with SIGSTOP, and return its ranks."""
    ranks = launch.ranks()
    assert len(ranks) == 2
    launch.signal_all(signal.SIGSTOP)
    return ranks


def check_refused(zombie: Launch, ranks: list[psutil.Process]) -> None:
    """Check that the resumed attempt ended with `Fenced`, and that none of its processes is left."""
    assert zombie.wait() == 80, zombie.events[-3:]
    assert zombie.of("error")[0]["kind"] == "Fenced"
    check_gone(ranks)


def rows_of_attempt(campaign: Arena, run: str, attempt: int) -> list[LedgerRow]:
    """Return the ledger rows that an attempt wrote."""
    return [row for row in campaign.rows(run) if row.attempt == attempt]


@pytest.mark.soak
def test_frozen_attempt_is_fenced_by_takeover(campaign: Arena) -> None:
    """A second launch is refused unless it takes over. The old attempt, resumed, is fenced and changes no ledger row."""
    run = "zombie-mid-step"
    spec = campaign.spec(run, pause_s=0.03)
    old = campaign.launch(spec)
    old.wait_for("checkpoint")
    ranks = freeze(old)
    before = rows_of_attempt(campaign, run, 1)
    refused = campaign.launch(spec, wait_s=0.2)
    assert refused.wait() == 81
    assert f"process {old.process.pid}" in refused.of("error")[0]["message"]
    new = campaign.launch(spec, takeover=True, wait_s=0.2)
    new.wait_for("attempt")
    old.signal_all(signal.SIGCONT)
    check_refused(old, ranks)
    refused = campaign.launch(spec)
    assert refused.wait() == 81, "the lock is the new holder's"
    assert new.wait() == 0, new.stderr
    assert rows_of_attempt(campaign, run, 1) == before
    assert campaign.journal(run) == campaign.journal("reference")
    assert campaign.losses(run) == campaign.losses("reference")


def files_of(campaign: Arena, run: str) -> dict[str, int]:
    """Return the files of a run's checkpoints, with their sizes."""
    folder = campaign.home / "checkpoints" / run
    return {str(path): path.stat().st_size for path in folder.rglob("attempt-*/**/*") if path.is_file()}


@pytest.mark.slow
def test_frozen_coordinator_cannot_commit(campaign: Arena) -> None:
    """It has verified that it owns the run, which is taken over and finished. Its commit is refused, and every file stays."""
    run, env = "zombie-in-commit", {"SABOTAGE": "stop-before-commit@30"}
    spec = campaign.spec(run, "train_sabotaged.py", env=env, passes=1, keep_last=2)
    old = campaign.launch(spec)
    old.wait_for("checkpoint", 2)
    coordinator = psutil.Process(old.of("attempt")[0]["pids"][0])
    while coordinator.status() != psutil.STATUS_STOPPED:
        assert old.process.poll() is None
    ranks = freeze(old)
    keeping = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"keep_last": 0})})
    campaign.launched(keeping, takeover=True)
    before, files = campaign.rows(run), files_of(campaign, run)
    old.signal_all(signal.SIGCONT)
    check_refused(old, ranks)
    assert campaign.rows(run) == before
    assert not [row for row in before if isinstance(row, RetireRow)]
    assert files_of(campaign, run) == files
    assert [row.step for row in campaign.lineage(run)] == STEPS
    assert [row.attempt for row in campaign.lineage(run)] == [1, 1, 2, 2, 2, 2, 2]
    check_rows_of_a_pass(campaign, run)


@pytest.mark.soak
def test_frozen_launch_resumes_during_recovery(campaign: Arena) -> None:
    """It finds its ranks dead and claims the run for an ended Dagster run. The recovery replaces that claim too."""
    run = "zombie-recovers"
    spec = campaign.spec(run, pause_s=0.3)  # so that it outlasts the wait of the recovery
    old = campaign.launch(spec, launched_by="dead", fence_look_s=0.5)
    old.wait_for("checkpoint")
    ranks = freeze(old)
    asked: dict[str, Any] = {"replaces": 1, "recovers": "dead", "launched_by": "new", "noticed_by": "recovery_sensor"}
    new = campaign.launch(spec, **asked, takeover=True, wait_s=5.0)
    for rank in ranks:
        rank.kill()
    old.signal_all(signal.SIGCONT)
    assert new.wait() == 0, new.stderr
    old.wait()
    assert campaign.rows(run, FinishRow)[0].attempt == new.of("attempt")[-1]["attempt"]
    assert campaign.journal(run) == campaign.journal("reference")
    assert campaign.losses(run) == campaign.losses("reference")
