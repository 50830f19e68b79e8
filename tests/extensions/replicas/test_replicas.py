import itertools
import os
import signal
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.dagster.assets.pages import model_page
from dlac_pipeline.extensions.replay.step_rows import StepRows
from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow, MembershipRow
from tests.conftest import Arena
from tests.extensions.replicas.replica_runs import STEPS, Trained, launch_groups, train
from tests.integration.test_cli import dlac

pytest.importorskip("torchft")


SHAPES: dict[str, dict[str, Any]] = {"whole": {}, "sharded": {"sharded": 1, "replicas": 2, "ranks_per_replica": 2}}
"""Three groups of one rank, and two groups of two ranks: ranks 0 and 1, and ranks 2 and 3."""
SHAPED = pytest.mark.parametrize("shape", ["whole", pytest.param("sharded", marks=pytest.mark.soak)])


@pytest.fixture(scope="module")
def calm(campaign: Arena) -> Callable[[str], Trained]:
    """A function that trains a run without a failure, once for each shape."""
    return cache(lambda shape: train(campaign, f"calm-{shape}", **SHAPES[shape]))


DEATHS: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {
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
    },
    "sharded": {
        "forward": {"dies_forward": "3:23"},
        "committer-reducing": {"dies_reducing": "1:23"},
        "committer-committed": {"dies_committed": "1:20"},
        "first-saving": {"dies_saving": "0:20"},
        "recorded": {"dies_recorded": "0:20"},
        "healing-source": {"dies_forward": "3:23", "dies_healing": "source", "replicas": 3},
        "healing-newcomer": {"dies_forward": "3:23", "dies_healing": "newcomer"},
    },
}


def deaths() -> list[Any]:
    """Return shape and name of all deaths. Most are in the soak, because others resemble them."""
    marks: dict[tuple[str, str], tuple[Any, ...]] = {("whole", "committer-reducing"): ()}
    slow = [("whole", name) for name in ("starting", "forward", "saving", "healing-source")]
    marks |= dict.fromkeys([*slow, ("sharded", "committer-reducing")], (pytest.mark.slow,))
    cases = [(shape, death) for shape, found in DEATHS.items() for death in found]
    return [pytest.param(*case, marks=marks.get(case, (pytest.mark.soak,))) for case in cases]


@pytest.mark.parametrize(("shape", "death"), deaths())
def test_death_repeats_and_loses_no_row(
    campaign: Arena, calm: Callable[[str], Trained], shape: str, death: str
) -> None:
    """Each row is in the ledger and in the committed batches once, and only processes of dead groups are replaced."""
    run, expected = f"dies-{shape}-{death}", calm(shape).journal
    trained = train(campaign, run, pause_s=0.02, **{**SHAPES[shape], **DEATHS[shape][death]})
    assert trained.journal == expected
    assert audit_run(campaign.lakehouse, run).exact
    recorded, last = campaign.recorded(run), 0
    for checkpoint in campaign.lineage(run):
        steps = range(last + 1, checkpoint.step + 1)
        assert recorded[checkpoint.step] == sorted(row for step in steps for row in expected[step])
        last = checkpoint.step
    assert [row.attempt for row in campaign.rows(run, ClaimRow)] == [1]
    died = [event["group"] for event in trained.launch.of("group_died")]
    assert len(died) == (2 if "healing" in death else 1)
    ranks = SHAPES[shape].get("ranks_per_replica", 1)
    assert {rank // ranks for rank, pids in trained.processes.items() if len(pids) > 1} <= set(died)
    assert {row.outcome for row in recoveries_of(campaign.lakehouse, run)} <= {"rejoined"}
    if shape == "whole":
        trains = max(campaign.rows(run, MembershipRow), key=lambda row: row.first_step)
        assert {each.rank for each in StepRows(campaign.lakehouse, run).of(STEPS)} == set(trains.groups)
    assert campaign.losses(run) == pytest.approx(campaign.losses(f"calm-{shape}"), rel=1e-5)
    checkpoints = {folder_of(row.manifest_uri) for row in campaign.lineage(run)}
    assert set((campaign.home / "checkpoints" / run).glob("attempt-*/step-*")) <= checkpoints


@pytest.mark.slow
@SHAPED
def test_groups_outlive_the_lighthouse(campaign: Arena, calm: Callable[[str], Trained], shape: str) -> None:
    """The groups meet again at a new lighthouse, all together: no process is replaced, and the losses are bit-identical."""
    run, expected = f"dark-{shape}", calm(shape).journal
    trained = train(campaign, run, pause_s=0.02, kills_lighthouse="1:23", **SHAPES[shape])
    assert trained.journal == expected
    assert {len(pids) for pids in trained.processes.values()} == {1}
    assert "the lighthouse of the replica groups was started again" in str(trained.launch.of("warning"))
    groups = tuple(range(SHAPES[shape].get("replicas", 3)))
    assert [tuple(row.groups) for row in campaign.rows(run, MembershipRow)] == [groups]
    assert campaign.losses(run) == campaign.losses(f"calm-{shape}")


@SHAPED
def test_calm_run_divides_the_reference_batches(campaign: Arena, calm: Callable[[str], Trained], shape: str) -> None:
    """Groups read the batches of the ordinary run, also if their number does not divide the 32 samples."""
    reference, found = campaign.journal("reference"), calm(shape)
    assert found.journal == {step: reference[step] for step in range(1, STEPS + 1)}
    groups = SHAPES[shape].get("replicas", 3)
    sizes = {len(each["rows"]) for each in found.entries if each["event"] == "share"}
    assert sizes == ({10, 11} if groups == 3 else {8})
    memberships = [(row.first_step, tuple(row.groups)) for row in campaign.rows(f"calm-{shape}", MembershipRow)]
    assert memberships == [(1, tuple(range(groups)))]


def test_rows_name_ranks_of_groups(campaign: Arena, calm: Callable[[str], Trained]) -> None:
    """Each rank of the groups has the rows of its own journal, alone and in the list of all, where three divides no batch."""
    entries = calm("whole").entries
    steps = StepRows(campaign.lakehouse, "calm-whole")
    for step in (1, STEPS):
        shares = {each["rank"]: each["rows"] for each in entries if (each["event"], each["step"]) == ("share", step)}
        listed = steps.of(step, column="row_id")
        for rank in range(3):
            assert [each.value for each in steps.of(step, rank=rank, column="row_id")] == shares[rank]
            assert [each.value for each in listed if each.rank == rank] == shares[rank]
    with pytest.raises(SpecInvalid, match="0 to 2 of step 1, found 3"):
        steps.of(1, rank=3)


@pytest.mark.parametrize(
    ("shape", "death", "groups"),
    [
        pytest.param("whole", {"dies_forward": "1:23", "awaits": "1:40"}, [(0, 1, 2), (0, 2)], marks=pytest.mark.slow),
        pytest.param("sharded", {"dies_forward": "3:23", "awaits": "2:40"}, [(0, 1), (0,)], marks=pytest.mark.soak),
    ],
)
def test_same_memberships_give_identical_losses(
    campaign: Arena, shape: str, death: dict[str, Any], groups: list[tuple[int, ...]]
) -> None:
    """Two runs whose groups die and rejoin at the same steps have bit-identical losses, and rows for each change."""
    runs = (f"twin-1-{shape}", f"twin-2-{shape}")
    for run in runs:
        train(campaign, run, **death, dropout=0.1, **SHAPES[shape])
        found = [(row.first_step, tuple(row.groups)) for row in campaign.rows(run, MembershipRow)]
        assert found == [(1, groups[0]), (23, groups[1]), (41, groups[0])]
    assert campaign.losses(runs[0]) == campaign.losses(runs[1])


@pytest.mark.slow
def test_resumed_groups_draw_the_same(campaign: Arena) -> None:
    """The first step after a restart of all groups has the random numbers of its membership, as in an undisturbed run."""
    for run, changes in (("undisturbed-draws", {}), ("resumed-draws", {"dies_forward": "*:23"})):
        train(campaign, run, replicas=1, dropout=0.1, **changes)
    assert campaign.losses("resumed-draws") == campaign.losses("undisturbed-draws")


@pytest.mark.slow
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
@pytest.mark.parametrize(("shape", "rank"), [("whole", 1), ("sharded", 3)])
def test_hung_group_is_replaced(campaign: Arena, calm: Callable[[str], Trained], shape: str, rank: int) -> None:
    """A group without a heartbeat for `hang_timeout_s` is killed, and no other one."""
    run, expected = f"hung-{shape}", calm(shape).journal
    trained = train(campaign, run, hangs=f"{rank}:23", hang_timeout_s=3.0, **SHAPES[shape])
    assert trained.journal == expected
    assert audit_run(campaign.lakehouse, run).exact
    assert [event["group"] for event in trained.launch.of("group_died")] == [1]
    assert "died of Hang: no heartbeat for 3 s, last while computing" in trained.launch.of("group_died")[0]["cause"]


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        pytest.param("whole", {"replicas": 2}, marks=pytest.mark.slow),
        pytest.param("sharded", {"ranks_per_replica": 1, "replicas": 3}, marks=pytest.mark.soak),
        pytest.param(
            "sharded", {"ranks_per_replica": 1, "replicas": 0, "world_size": 4}, marks=pytest.mark.soak, id="no groups"
        ),
    ],
)
def test_stopped_run_resumes_with_other_groups(
    campaign: Arena, calm: Callable[[str], Trained], shape: str, changes: dict[str, Any]
) -> None:
    """A stop ends all groups after one checkpoint at the same step. Other groups train the rest, with the same batches."""
    run = f"stopped-{shape}-{'-'.join(map(str, changes.values()))}"
    stop_after_checkpoint(campaign, run, **SHAPES[shape])
    assert train(campaign, run, **{**SHAPES[shape], **changes}).journal == calm(shape).journal
    assert audit_run(campaign.lakehouse, run).exact
    assert campaign.losses(run) == pytest.approx(campaign.losses(f"calm-{shape}"), rel=1e-5)


def stop_after_checkpoint(campaign: Arena, run: str, **changes: Any) -> None:
    """Stop a run with replica groups after its first checkpoint."""
    launch = launch_groups(campaign, run, pause_s=0.02, **changes)
    launch.wait_for("checkpoint")
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr


@pytest.mark.slow
def test_run_stops_after_rejoin(campaign: Arena, calm: Callable[[str], Trained]) -> None:
    """A group was replaced. SIGTERM still ends the run in order, after a checkpoint of the last step."""
    run = "stopped-after-rejoin"
    launch = launch_groups(campaign, run, pause_s=0.05, dies_forward="1:12", every_steps=100)
    launch.wait_for("group_rejoined")
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    assert launch.of("ended")[0]["ending"] == "stopped"
    (checkpoint,) = campaign.lineage(run)
    assert checkpoint.step == launch.of("ended")[0]["step"] > 12
    assert train(campaign, run).journal == calm("whole").journal
    assert audit_run(campaign.lakehouse, run).exact


@pytest.mark.slow
@SHAPED
def test_death_of_all_groups_resumes_from_ledger(campaign: Arena, calm: Callable[[str], Trained], shape: str) -> None:
    """Without a group that has the state, the next attempt resumes from the last checkpoint."""
    run = f"all-die-{shape}"
    assert train(campaign, run, dies_forward="*:23", **SHAPES[shape]).journal == calm(shape).journal
    assert [row.attempt for row in campaign.rows(run, ClaimRow)] == [1, 2]
    assert audit_run(campaign.lakehouse, run).exact


@pytest.mark.soak
def test_newcomer_without_state_ends_attempt(campaign: Arena, calm: Callable[[str], Trained]) -> None:
    """A newcomer that never gets a state stops no run: its peers would drop each step with it. The next attempt trains."""
    changes = {"awaits": "1:30", "pause_s": 0.1, "attempts_without_progress": 1}
    trained = train(campaign, "no-state", dies_forward="1:23", loses_states=True, **changes)
    assert trained.journal == calm("whole").journal
    assert [row.attempt for row in campaign.rows("no-state", ClaimRow)] == [1, 2]
    assert audit_run(campaign.lakehouse, "no-state").exact


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("synchronous", marks=pytest.mark.soak), "asynchronous"])
def test_committer_changes_to_and_fro(campaign: Arena, calm: Callable[[str], Trained], mode: str) -> None:
    """Group 1 commits while group 0 is dead, group 0 after it rejoins, and group 1 again after its second death."""
    run = f"to-and-fro-{mode}"
    trained = train(campaign, run, mode=mode, every_steps=5, dies_forward="0:12", awaits="0:21", dies_again="0:38")
    assert trained.journal == calm("whole").journal
    assert audit_run(campaign.lakehouse, run).exact
    assert campaign.losses(run) == pytest.approx(campaign.losses("calm-whole"), rel=1e-5)
    committers = [row.checkpoint_id.split("-")[-2] for row in campaign.lineage(run)]
    assert [key for key, _ in itertools.groupby(committers)][:4] == ["0", "1", "0", "1"]


@pytest.mark.slow
def test_end_names_last_step(campaign: Arena) -> None:
    """A group that dies in the last step is not replaced. The end of the run is at that step, and not where the group was."""
    trained = train(campaign, "dies-last", pause_s=0.05, dies_forward=f"1:{STEPS}")
    assert trained.launch.of("ended")[0]["step"] == STEPS
