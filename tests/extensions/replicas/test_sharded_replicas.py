from __future__ import annotations

import os
import signal
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow, MembershipRow
from tests.extensions.replicas.replica_runs import STEPS, Trained, launch_groups, train

if TYPE_CHECKING:
    from tests.conftest import Arena

pytest.importorskip("torchft")
SHARDED: dict[str, Any] = {"sharded": 1, "replicas": 2, "ranks_per_replica": 2}
"""Two groups of two ranks: ranks 0 and 1, and ranks 2 and 3."""


@pytest.fixture(scope="module")
def calm(campaign: Arena) -> Trained:
    """A run of two groups of two ranks without a failure."""
    return train(campaign, "calm-sharded", **SHARDED)


DEATHS: dict[str, dict[str, Any]] = {
    "forward": {"dies_forward": "3:23"},
    "first-rank": {"dies_forward": "2:23"},
    "reducing": {"dies_reducing": "3:23"},
    "committer-reducing": {"dies_reducing": "1:23"},
    "committed": {"dies_committed": "2:23"},
    "committer-committed": {"dies_committed": "1:20"},
    "saving": {"dies_saving": "1:20"},
    "first-saving": {"dies_saving": "0:20"},
    "recorded": {"dies_recorded": "0:20"},
    "healing-source": {"dies_forward": "3:23", "dies_healing": "source", "replicas": 3},
    "healing-newcomer": {"dies_forward": "3:23", "dies_healing": "newcomer"},
}


def soaks_all_but(chosen: str) -> list[Any]:
    """Return the deaths, of which only one is not part of the soak tests."""
    return [death if death == chosen else pytest.param(death, marks=pytest.mark.soak) for death in DEATHS]


@pytest.mark.parametrize("death", soaks_all_but("committer-reducing"))
def test_death_of_rank_replaces_its_group(campaign: Arena, calm: Trained, death: str) -> None:
    """Each row is in the ledger and in the committed batches once, and only the dead rank's group is replaced."""
    run = f"sharded-{death}"
    trained = train(campaign, run, pause_s=0.02, **{**SHARDED, **DEATHS[death]})
    reference = campaign.journal("reference")
    assert trained.journal == {step: reference[step] for step in range(1, STEPS + 1)}
    assert audit_run(campaign.lakehouse, run).exact
    assert [row.attempt for row in campaign.rows(run, ClaimRow)] == [1]
    died = [event["group"] for event in trained.launch.of("group_died")]
    assert len(died) == (2 if "healing" in death else 1)
    assert {rank // 2 for rank, pids in trained.processes.items() if len(pids) > 1} <= set(died)
    assert {row.outcome for row in recoveries_of(campaign.lakehouse, run)} <= {"rejoined"}
    assert campaign.losses(run) == pytest.approx(campaign.losses("calm-sharded"), rel=1e-5)


@pytest.mark.soak
def test_sharded_groups_train_as_one(campaign: Arena, calm: Trained) -> None:
    """Two groups of two ranks have the batches of any run, and its losses but for the rounding of sums."""
    reference = campaign.journal("reference")
    assert calm.journal == {step: reference[step] for step in range(1, STEPS + 1)}
    train(campaign, "calm-alone", replicas=1)
    assert campaign.losses("calm-sharded") == pytest.approx(campaign.losses("calm-alone"), rel=1e-5)


@pytest.mark.soak
def test_same_memberships_give_identical_losses(campaign: Arena) -> None:
    """Two runs whose groups die and rejoin at the same steps have bit-identical losses, and rows for each change."""
    runs = ("sharded-twin-1", "sharded-twin-2")
    for run in runs:
        train(campaign, run, dies_forward="3:23", awaits="2:40", dropout=0.1, **SHARDED)
    for run in runs:
        found = [(row.first_step, tuple(row.groups)) for row in campaign.rows(run, MembershipRow)]
        assert found == [(1, (0, 1)), (23, (0,)), (41, (0, 1))]
    assert campaign.losses(runs[0]) == campaign.losses(runs[1])


@pytest.mark.soak
@pytest.mark.parametrize(
    "changes", [{"replicas": 3}, {"ranks_per_replica": 1, "replicas": 3}, {"replicas": 0, "world_size": 4}]
)
def test_stopped_run_resumes_with_other_ranks(campaign: Arena, calm: Trained, changes: dict[str, Any]) -> None:
    """A checkpoint of two groups of two ranks is resumed by any number of groups, of ranks in them, and without groups."""
    run = f"sharded-stopped-{'-'.join(f'{name}-{value}' for name, value in changes.items())}"
    launch = launch_groups(campaign, run, pause_s=0.02, **SHARDED)
    launch.wait_for("checkpoint")
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    settings = {**SHARDED, **changes}
    if not settings["replicas"]:
        settings["ranks_per_replica"] = 1
    trained = train(campaign, run, **settings)
    assert trained.journal == calm.journal
    assert audit_run(campaign.lakehouse, run).exact
    assert campaign.losses(run) == pytest.approx(campaign.losses("calm-sharded"), rel=1e-5)


@pytest.mark.soak
def test_death_of_all_groups_resumes_from_ledger(campaign: Arena, calm: Trained) -> None:
    """Without a group that has the state, the next attempt resumes from the last checkpoint."""
    trained = train(campaign, "sharded-all-die", dies_forward="*:23", **SHARDED)
    assert trained.journal == calm.journal
    assert [row.attempt for row in campaign.rows("sharded-all-die", ClaimRow)] == [1, 2]
    assert audit_run(campaign.lakehouse, "sharded-all-die").exact


@pytest.mark.soak
@pytest.mark.parametrize("fault", [{"kills_lighthouse": "3:23"}, {"hangs": "3:23", "hang_timeout_s": 3.0}])
def test_other_faults_repeat_and_lose_no_row(campaign: Arena, calm: Trained, fault: dict[str, Any]) -> None:
    """Sharded groups outlive their lighthouse, and a rank that hangs."""
    run = f"sharded-{next(iter(fault))}"
    trained = train(campaign, run, pause_s=0.02, **SHARDED, **fault)
    assert trained.journal == calm.journal
    assert audit_run(campaign.lakehouse, run).exact
    assert [event["group"] for event in trained.launch.of("group_died")] == ([1] if "hangs" in fault else [])


@pytest.mark.soak
@pytest.mark.parametrize("sharded", [SHARDED, {"replicas": 2}], ids=["sharded", "whole"])
def test_interval_in_seconds_counts_once(campaign: Arena, sharded: dict[str, Any]) -> None:
    """All ranks take the checkpoint that the committer's first rank asks for, and no second one in the next step."""
    run = f"seconds-{len(sharded)}"
    train(campaign, run, pause_s=0.05, every_steps=None, every_s=1.0, **sharded)
    steps = [checkpoint.step for checkpoint in campaign.lineage(run)]
    assert len(steps) > 2
    assert all(after - before > 2 for before, after in pairwise(steps[:-1]))


@pytest.mark.soak
def test_other_engine_refuses_the_checkpoint(campaign: Arena, calm: Trained) -> None:
    """Groups of whole models do not resume from shards, as in runs without groups."""
    launch = launch_groups(campaign, "sharded-then-whole", pause_s=0.02, **SHARDED)
    launch.wait_for("checkpoint")
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    again = launch_groups(campaign, "sharded-then-whole", replicas=2)
    assert again.wait() != 0
    assert "ResumeMismatch" in str(again.of("error"))
