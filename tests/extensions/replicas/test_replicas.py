from __future__ import annotations

import itertools
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.dagster.assets.pages import model_page
from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow, MembershipRow
from tests.extensions.replicas.replica_runs import STEPS, Trained, launch_groups, train
from tests.integration.test_cli import dlac

if TYPE_CHECKING:
    from tests.conftest import Arena

pytest.importorskip("torchft")


@pytest.fixture(scope="module")
def calm(campaign: Arena) -> Trained:
    """A run of three groups without a failure."""
    return train(campaign, "calm")


DEATHS: dict[str, dict[str, Any]] = {
    "starting": {"dies_starting": "1:0"},
    "forward": {"dies_forward": "1:23"},
    "reducing": {"dies_reducing": "1:23"},
    "committer-reducing": {"dies_reducing": "0:23"},
    "committed": {"dies_committed": "1:23"},
    "committer-committed": {"dies_committed": "0:20"},
    "saving": {"dies_saving": "0:20"},
    "recorded": {"dies_recorded": "0:20"},
    "healing-source": {"dies_forward": "1:23", "awaits": "1:40", "dies_healing": "source"},
    "healing-newcomer": {"dies_forward": "1:23", "awaits": "1:40", "dies_healing": "newcomer"},
    "newcomer-in-dark": {"dies_forward": "1:23", "darkens": 1},
}


_SLOW = ("forward", "saving")
SOAKED = ("reducing", "committed", "committer-committed", "recorded", "healing-newcomer", "newcomer-in-dark")
"""Deaths that others of the list resemble. They are in the soak."""


def _marks_of(death: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.soak] if death in SOAKED else [pytest.mark.slow] if death in _SLOW else []


@pytest.mark.parametrize("death", [pytest.param(each, marks=_marks_of(each)) for each in DEATHS])
def test_death_repeats_and_loses_no_row(campaign: Arena, calm: Trained, death: str) -> None:
    """Each row is in the ledger and in the committed batches once, and only dead processes are replaced."""
    run = f"dies-{death}"
    trained = train(campaign, run, pause_s=0.02, **DEATHS[death])
    assert trained.journal == calm.journal
    assert audit_run(campaign.lakehouse, run).exact
    recorded = campaign.recorded(run)
    last = 0
    for checkpoint in campaign.lineage(run):
        steps = range(last + 1, checkpoint.step + 1)
        assert recorded[checkpoint.step] == sorted(row for step in steps for row in calm.journal[step])
        last = checkpoint.step
    assert [row.attempt for row in campaign.rows(run, ClaimRow)] == [1]
    deaths = trained.launch.of("group_died")
    died = [event["group"] for event in deaths]
    assert len(died) == (2 if "healing" in death else 1), deaths
    assert {rank for rank, pids in trained.processes.items() if len(pids) > 1} <= set(died)
    trains = max(campaign.rows(run, MembershipRow), key=lambda row: row.first_step)
    assert {each.rank for each in StepRows(campaign.lakehouse, run).of(STEPS)} == set(trains.groups)
    assert campaign.losses(run) == pytest.approx(campaign.losses("calm"), rel=1e-5)
    checkpoints = {folder_of(row.manifest_uri) for row in campaign.lineage(run)}
    assert set((campaign.home / "checkpoints" / run).glob("attempt-*/step-*")) <= checkpoints


def test_groups_outlive_the_lighthouse(campaign: Arena, calm: Trained) -> None:
    """The groups meet again at a new lighthouse, all together: no process is replaced, and the losses are bit-identical."""
    trained = train(campaign, "dark", pause_s=0.02, kills_lighthouse="1:23")
    assert trained.journal == calm.journal
    assert {len(pids) for pids in trained.processes.values()} == {1}
    assert "the lighthouse of the replica groups was started again" in str(trained.launch.of("warning"))
    assert [tuple(row.groups) for row in campaign.rows("dark", MembershipRow)] == [(0, 1, 2)]
    assert campaign.losses("dark") == campaign.losses("calm")


def test_calm_run_divides_the_reference_batches(campaign: Arena, calm: Trained) -> None:
    """Three groups read the batches of the ordinary run, in whose 32 samples three does not divide."""
    reference = campaign.journal("reference")
    assert calm.journal == {step: reference[step] for step in range(1, STEPS + 1)}
    assert {len(each["rows"]) for each in calm.entries if each["event"] == "share"} == {10, 11}
    assert [(row.first_step, tuple(row.groups)) for row in campaign.rows("calm", MembershipRow)] == [(1, (0, 1, 2))]


def test_rows_name_ranks_of_groups(campaign: Arena, calm: Trained) -> None:
    """Each rank of the groups has the rows of its own journal, alone and in the list of all, where three divides no batch."""
    steps = StepRows(campaign.lakehouse, "calm")
    for step in (1, STEPS):
        shares = {
            each["rank"]: each["rows"] for each in calm.entries if (each["event"], each["step"]) == ("share", step)
        }
        listed = steps.of(step, column="row_id")
        for rank in range(3):
            assert [each.value for each in steps.of(step, rank=rank, column="row_id")] == shares[rank]
            assert [each.value for each in listed if each.rank == rank] == shares[rank]
    with pytest.raises(SpecInvalid, match="0 to 2 of step 1, found 3"):
        steps.of(1, rank=3)


@pytest.mark.slow
def test_same_memberships_give_identical_losses(campaign: Arena) -> None:
    """Two runs whose groups die and rejoin at the same steps have bit-identical losses, and rows for each change."""
    runs = ("twin-1", "twin-2")
    for run in runs:
        train(campaign, run, dies_forward="1:23", awaits="1:40", dropout=0.1)
    first, second = (campaign.rows(run, MembershipRow) for run in runs)
    expected = [(1, (0, 1, 2)), (23, (0, 2)), (41, (0, 1, 2))]
    assert [(row.first_step, tuple(row.groups)) for row in first] == expected
    assert [(row.first_step, tuple(row.groups)) for row in second] == expected
    assert campaign.losses("twin-1") == campaign.losses("twin-2")


@pytest.mark.slow
def test_resumed_groups_draw_the_same(campaign: Arena) -> None:
    """The first step after a restart of all groups has the random numbers of its membership, as in an undisturbed run."""
    for run, changes in (("undisturbed-draws", {}), ("resumed-draws", {"dies_forward": "*:23"})):
        train(campaign, run, replicas=1, dropout=0.1, **changes)
    assert campaign.losses("resumed-draws") == campaign.losses("undisturbed-draws")


def test_death_is_an_incident(campaign: Arena) -> None:
    """`dlac incidents` shows its cause, the step from which the group takes part again, and the groups present."""
    run = "incident"
    train(campaign, run, dies_forward="2:23", awaits="2:40")
    (found,) = recoveries_of(campaign.lakehouse, run)
    assert found.outcome == "rejoined"
    assert found.cause == "group 2: rank 2 was killed by SIGKILL, while computing"
    back = campaign.rows(run, MembershipRow)[-1].first_step
    assert 41 <= back <= found.resumed_step <= STEPS
    assert found.total_s > found.detect_s > 0
    shown = dlac("incidents", run, home=campaign.home).stdout
    changes = [tuple(line.split(maxsplit=2)) for line in shown.splitlines()[-3:]]
    assert changes == [("1", "1", "0, 1, 2"), ("23", "1", "0, 1"), (str(back), "1", "0, 1, 2")]
    records = model_page(campaign.lakehouse, run)["replica_groups"].value.records
    shown_by_dagster = [(record.data["first_step"], record.data["groups"]) for record in records]
    assert shown_by_dagster == [(back, "0, 1, 2"), (23, "0, 1"), (1, "0, 1, 2")]


@pytest.mark.soak
def test_hung_group_is_replaced(campaign: Arena, calm: Trained) -> None:
    """A group without a heartbeat for `hang_timeout_s` is killed, and no other one."""
    trained = train(campaign, "hung", hangs="1:23", hang_timeout_s=2.0)
    assert trained.journal == calm.journal
    assert [event["group"] for event in trained.launch.of("group_died")] == [1]
    assert "died of Hang: no heartbeat for 2 s, last while computing" in trained.launch.of("group_died")[0]["cause"]


@pytest.mark.slow
def test_stopped_run_resumes_with_fewer_groups(campaign: Arena, calm: Trained) -> None:
    """A stop ends all groups after one checkpoint at the same step. Two groups train the rest, with the same batches."""
    launch = launch_groups(campaign, "stopped", pause_s=0.02)
    launch.wait_for("checkpoint")
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    trained = train(campaign, "stopped", replicas=2)
    assert trained.journal == calm.journal
    assert audit_run(campaign.lakehouse, "stopped").exact
    assert campaign.losses("stopped") == pytest.approx(campaign.losses("calm"), rel=1e-5)


@pytest.mark.soak
@pytest.mark.parametrize("death", [{}, {"dies_committed": "0:33"}], ids=["calm", "committer-dies"])
def test_script_leaves_with_all_groups(campaign: Arena, calm: Trained, death: dict[str, Any]) -> None:
    """Groups that leave the loop at the same step commit it, also if one dies in it. The run is not finished."""
    run = f"left-{len(death)}"
    launch = launch_groups(campaign, run, leaves=33, pause_s=0.02, **death)
    assert launch.wait() == 0, launch.stderr
    assert launch.of("ended")[0]["ending"] == "left"
    assert campaign.lineage(run)[-1].step == 33
    trained = train(campaign, run)
    assert trained.journal == calm.journal
    assert audit_run(campaign.lakehouse, run).exact


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.soak)])
def test_run_stops_after_rejoin(campaign: Arena, calm: Trained, start: str) -> None:
    """A group was replaced. SIGTERM still ends the run in order, after a checkpoint of the last step."""
    run = f"stopped-after-rejoin-{start}"
    launch = launch_groups(
        campaign, run, pause_s=0.3 if start == "spawn" else 0.05, dies_forward="1:12", every_steps=100, start=start
    )
    launch.wait_for("group_rejoined")
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    assert launch.of("ended")[0]["ending"] == "stopped"
    (checkpoint,) = campaign.lineage(run)
    assert checkpoint.step == launch.of("ended")[0]["step"] > 12
    trained = train(campaign, run)
    assert trained.journal == calm.journal
    assert audit_run(campaign.lakehouse, run).exact


def test_death_of_all_groups_resumes_from_ledger(campaign: Arena, calm: Trained) -> None:
    """Without a group that has the state, the next attempt resumes from the last checkpoint."""
    trained = train(campaign, "all-die", dies_forward="*:23")
    assert trained.journal == calm.journal
    assert [row.attempt for row in campaign.rows("all-die", ClaimRow)] == [1, 2]
    assert audit_run(campaign.lakehouse, "all-die").exact


@pytest.mark.soak
def test_newcomer_without_state_ends_attempt(campaign: Arena, calm: Trained) -> None:
    """A newcomer that never gets a state stops no run: its peers would drop each step with it. The next attempt trains."""
    changes = {"awaits": "1:30", "pause_s": 0.1, "attempts_without_progress": 1}
    trained = train(campaign, "no-state", dies_forward="1:23", loses_states=True, **changes)
    assert trained.journal == calm.journal
    assert [row.attempt for row in campaign.rows("no-state", ClaimRow)] == [1, 2]
    assert audit_run(campaign.lakehouse, "no-state").exact


@pytest.mark.slow
def test_repeated_exception_ends_the_run(campaign: Arena) -> None:
    """Groups that raise the same exception are not replaced for ever."""
    launch = launch_groups(campaign, "wrong", raises=23)
    assert launch.wait() != 0
    assert "the script is wrong" in str(launch.of("error")[0])


@pytest.mark.parametrize("mode", [pytest.param("synchronous", marks=pytest.mark.soak), "asynchronous"])
def test_committer_changes_to_and_fro(campaign: Arena, calm: Trained, mode: str) -> None:
    """Group 1 commits while group 0 is dead, group 0 after it rejoins, and group 1 again after its second death."""
    run = f"to-and-fro-{mode}"
    trained = train(campaign, run, mode=mode, every_steps=5, dies_forward="0:12", awaits="0:21", dies_again="0:38")
    assert trained.journal == calm.journal
    assert audit_run(campaign.lakehouse, run).exact
    assert campaign.losses(run) == pytest.approx(campaign.losses("calm"), rel=1e-5)
    committers = [row.checkpoint_id.split("-")[-2] for row in campaign.lineage(run)]
    assert [key for key, _ in itertools.groupby(committers)][:4] == ["0", "1", "0", "1"]


@pytest.mark.slow
def test_end_names_last_step(campaign: Arena) -> None:
    """A group that dies in the last step is not replaced. The end of the run is at that step, and not where the group was."""
    trained = train(campaign, "dies-last", pause_s=0.05, dies_forward=f"1:{STEPS}")
    assert trained.launch.of("ended")[0]["step"] == STEPS
