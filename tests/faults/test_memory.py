"""A relaunch on the same node resumes from memory: it replays at most two batches, and reads no file of a checkpoint."""

import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.lakehouse.ledger.recoveries import recoveries_of
from dlac_pipeline.lakehouse.ledger.run_rows import restorable_rows
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow, QuarantinedCheckpointRow
from dlac_pipeline.memory_states.memory_file import MemoryFile
from dlac_pipeline.memory_states.states import memory_folder, read_states
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, wait_until
from tests.launches import Launch

_BATCH = 32
_STEPS = 60


def spec_of(arena: Arena, run: str, program: str = "train_tiny.py", **changes: Any) -> JobSpec:
    """Return a spec of a run that keeps a state after each step, and whose checkpoints are far between."""
    kept = {"memory": "/dev/shm", "memory_every_steps": 1, "every_steps": 40, "pause_s": 0.03, "steps": _STEPS}
    return arena.spec(run, program, **{**kept, **changes})


def kill_rank(arena: Arena, run: str, launch: Launch, rank: int, *, step: int) -> dict[str, Any]:
    """Kill a rank once a state of this step or a later one is whole, and return the recovery."""
    folder = memory_folder(spec_of(arena, run))
    assert folder is not None
    wait_until(
        lambda: launch.process.poll() is not None or any(each.first.step >= step for each in read_states(folder)),
        what=f"a state of step {step}",
    )
    assert launch.process.poll() is None, launch.stderr
    os.kill(launch.ranks()[rank].pid, signal.SIGKILL)
    return launch.wait_for("recovered", len(launch.of("recovered")) + 1)


def check_run(arena: Arena, run: str, launch: Launch) -> None:
    """Check that the run ended, exactly as the undisturbed run, and left nothing in memory."""
    assert launch.wait() == 0, launch.stderr
    reference = arena.journal("reference")
    assert arena.journal(run) == {step: reference[step] for step in range(1, _STEPS + 1)}
    assert arena.losses(run) == arena.losses("reference")[:_STEPS]
    assert audit_run(arena.lakehouse, run).exact
    folder = memory_folder(spec_of(arena, run))
    assert folder is not None
    assert not folder.exists()


def test_killed_rank_costs_two_batches(campaign: Arena) -> None:
    """A rank is killed before the first checkpoint, and after it, whose files are destroyed: nothing reads them."""
    run = "memory"
    launch = campaign.launch(spec_of(campaign, run))
    first = kill_rank(campaign, run, launch, 1, step=5)
    assert first["resumed_from"] is None
    launch.wait_for("checkpoint")
    (head,) = campaign.rows(run, CheckpointRow)
    for path in (campaign.home / "checkpoints" / run).glob("attempt-*/step-*/*.pt"):
        path.write_bytes(b"destroyed")
    second = kill_rank(campaign, run, launch, 0, step=head.step + 5)
    assert (second["resumed_from"], second["resumed_step"] > head.step) == (head.checkpoint_id, True)
    check_run(campaign, run, launch)
    assert max(each["rows_replayed"] for each in (first, second)) <= 2 * _BATCH
    assert [row.memory_of for row in campaign.rows(run, ClaimRow)] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("point_s", [None, 2.0])
def test_states_follow_cost_and_failures(campaign: Arena, point_s: float | None, tmp_path: Path) -> None:
    """A rank is killed after 100 steps in 5 s: a state is up to 10 s old, or 2 s as set. After the failure states are denser."""
    run, found = f"memory-paced-{point_s}", list[int]()
    paced: dict[str, Any] = {"memory_every_steps": 0, "memory_point_s": point_s, "every_steps": 1_000, "pause_s": 0.05}
    spec = spec_of(campaign, run, memory=str(tmp_path), passes=9, steps=500, **paced)
    launch, folder = campaign.launch(spec), memory_folder(spec)
    assert folder is not None
    wait_until(lambda: any(each["step"] == 100 for each in campaign.entries(run)), what="step 100")
    os.kill(launch.ranks()[1].pid, signal.SIGKILL)
    recovered = launch.wait_for("recovered")
    assert (recovered["rows_replayed"] > 42 * _BATCH) == (point_s is None)

    def are_paced() -> bool:
        found[:] = [each.first.step for each in read_states(folder)]
        return len(found) == 2 and found[1] > recovered["resumed_step"] + 4

    wait_until(are_paced, what="two states after the first four")
    assert found[0] - found[1] < 42


@pytest.mark.slow
def test_survivor_keeps_last_step(campaign: Arena) -> None:
    """A rank, and then the other one, dies long after the last state: the survivor keeps one, and no step is repeated."""
    run = "memory-last"
    settings: dict[str, Any] = {"memory_every_steps": 1_000, "every_steps": 1_000, "hidden": "5000", "steps": 14}
    settings |= {"slow_rank": "0", "slow_s": "0.5", "pause_s": 0}
    launch = campaign.launch(spec_of(campaign, run, **settings))
    for rank, step in enumerate((5, 10)):
        wait_until(lambda: any(each["step"] >= step for each in campaign.entries(run)), what=f"step {step}")  # noqa: B023
        time.sleep(0.2)  # rank 0 is in its next forward pass then
        os.kill(launch.ranks()[rank].pid, signal.SIGKILL)
        found = launch.wait_for("recovered", rank + 1)
        assert (found["rows_replayed"] < _BATCH, found["resumed_step"] >= step) == (True, True)
    assert launch.wait() == 0, launch.stderr
    assert audit_run(campaign.lakehouse, run).exact
    calm = campaign.launch(spec_of(campaign, f"{run}-calm", **settings))
    assert calm.wait() == 0, calm.stderr
    assert campaign.losses(run) == campaign.losses(f"{run}-calm")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["asynchronous", "synchronous"])
def test_state_of_the_head_is_used(campaign: Arena, mode: str) -> None:
    """A rank is killed soon after a commit: the newest state in memory is of the checkpoint's own step."""
    run = f"memory-head-{mode}"
    spec = spec_of(campaign, run, every_steps=10, mode=mode, deadlock_at=11)
    launch, folder = campaign.launch(spec), memory_folder(spec)
    assert folder is not None
    wait_until(lambda: bool(campaign.rows(run, CheckpointRow)), what="a checkpoint")
    for path in (campaign.home / "checkpoints" / run).glob("attempt-*/step-*/*.pt"):
        path.write_bytes(b"destroyed")
    wait_until(lambda: [state.first.step for state in read_states(folder)] == [10, 9], what="the state of step 10")
    os.kill(launch.ranks()[1].pid, signal.SIGKILL)
    found = launch.wait_for("recovered")
    (head,) = campaign.rows(run, CheckpointRow)
    assert (found["resumed_from"], found["resumed_step"]) == (head.checkpoint_id, head.step)
    assert [(row.memory_of, row.memory_step) for row in campaign.rows(run, ClaimRow)] == [(0, 0), (1, 10)]
    check_run(campaign, run, launch)
    assert found["rows_replayed"] <= _BATCH


@pytest.mark.slow
def test_stop_request_still_takes_checkpoint(campaign: Arena) -> None:
    """The message that asks to stop may arrive while a state is kept: the run stops after a checkpoint of that step."""
    run = "memory-stopped"
    spec = spec_of(campaign, run)
    launch = campaign.launch(spec)
    launch.wait_for("step")
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    assert launch.of("ended")[0]["ending"] == "stopped"
    (checkpoint,) = campaign.rows(run, CheckpointRow)
    assert checkpoint.step == launch.of("stopped")[0]["step"] == launch.of("ended")[0]["step"]
    folder = memory_folder(spec)
    assert folder is not None
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "damage", ["file", "nan", *(pytest.param(each, marks=pytest.mark.soak) for each in ("seal", "writable", "rewind"))]
)
def test_unusable_state_is_not_used(campaign: Arena, damage: str, tmp_path: Path) -> None:
    """A cut file, NaN in weights, no seal, a folder others may write, a rewound branch: the checkpoint is read instead."""
    run = f"memory-{damage}"
    spec = spec_of(campaign, run, every_steps=10, memory=str(tmp_path))  # other tests share the user's folder
    launch = campaign.launch(spec)
    launch.wait_for("checkpoint", 2)
    time.sleep(0.2)
    launch.destroy()
    folder = memory_folder(spec)
    assert folder is not None
    assert read_states(folder)
    for slot in [state.folder for state in read_states(folder)]:
        if damage == "seal":
            (slot / "rank-00001.sealed").unlink()
        elif damage == "file":
            os.truncate(slot / "rng-00000.pt", 100)
        elif damage == "nan":
            file = MemoryFile(slot / "torch-state.pt", is_mapped=False)
            state = torch.load(slot / "torch-state.pt", weights_only=True)
            state["model"]["weight"].fill_(float("nan"))
            file.overwrite(state)
            file.close()
    if damage == "writable":
        folder.parent.chmod(0o777)
    if damage == "rewind":
        rewind_run(campaign.lakehouse, run, nonce="back", target=10, spec=spec)
    try:
        again = campaign.launch(spec, takeover=True)
        first = again.wait_for("attempt")["step"]
    finally:
        folder.parent.chmod(0o700)
    check_run(campaign, run, again)
    assert campaign.rows(run, ClaimRow)[-1].memory_of == 0
    assert first == 10 if damage == "rewind" else again.of("attempt")[-1]["step"] % 10 == 0
    assert len(again.of("attempt")) == (2 if damage == "nan" else 1)  # it is found when it is loaded


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_read_only_memory_ends_no_run(campaign: Arena) -> None:
    """Processes of ranks start without semaphores in /dev/shm. A warning names the setting, and the run trains on."""
    under = ["unshare", "-m", "sh", "-c", 'mount -o remount,bind,ro /dev/shm && exec "$@"', "sh"]
    launch = campaign.launch(spec_of(campaign, "memory-read-only"), under=under)
    assert launch.wait() == 0, launch.stderr
    assert any("checkpoint.memory" in event["message"] for event in launch.of("warning"))


@pytest.mark.slow
@pytest.mark.parametrize("damaged", ["manifest", pytest.param("folder", marks=pytest.mark.soak)])
@pytest.mark.parametrize("only", [True, False])
def test_damaged_head_leaves_memory(campaign: Arena, damaged: str, only: bool) -> None:
    """All ranks die and the head is damaged: the run resumes from memory, quarantines the head later, and repeats no row."""
    run = f"memory-head-damaged-{damaged}-{only:d}"
    spec = spec_of(campaign, run, every_steps=20 if only else 10, deadlock_at=24, keep_last=2, pause_s=0.01)
    launch, folder = campaign.launch(spec), memory_folder(spec)
    assert folder is not None
    wait_until(lambda: 23 in [state.first.step for state in read_states(folder)], what="the state of step 23")
    head = campaign.lineage(run)[-1]
    manifest = folder_of(head.manifest_uri) / "manifest.json"
    if damaged == "folder":
        shutil.rmtree(manifest.parent)
        manifest.parent.mkdir()
    else:
        manifest.write_bytes(manifest.read_bytes().replace(b"a", b"b", 1))
    for rank in launch.ranks():
        os.kill(rank.pid, signal.SIGKILL)
    recovered = launch.wait_for("recovered")
    assert (recovered["resumed_step"], recovered["rows_replayed"]) == (23, 0)
    check_run(campaign, run, launch)
    assert [row.memory_step for row in campaign.rows(run, ClaimRow)] == [0, 23]
    (quarantined,) = campaign.rows(run, QuarantinedCheckpointRow)
    following = next(row for row in campaign.lineage(run) if row.parent == head.checkpoint_id)
    assert (quarantined.checkpoint_id, quarantined.seq) == (head.checkpoint_id, following.seq)
    assert any("found damage" in event["message"] for event in launch.of("warning"))
    kept = restorable_rows(campaign.rows(run))
    assert head.checkpoint_id not in kept
    assert len(kept) == 2


@pytest.mark.slow
def test_wrong_model_leaves_state(campaign: Arena) -> None:
    """A launch whose model has another size fails. The state stays for the corrected script, and no finished step is repeated."""
    run = "memory-misfit"
    spec = spec_of(campaign, run, deadlock_at=24, pause_s=0.01)
    launch, folder = campaign.launch(spec), memory_folder(spec)
    assert folder is not None
    wait_until(lambda: 23 in [state.first.step for state in read_states(folder)], what="the state of step 23")
    time.sleep(0.2)
    launch.destroy()
    wrong = campaign.launch(spec_of(campaign, run, outputs=2), takeover=True)
    assert wrong.wait() != 0
    assert "size mismatch" in str(wrong.of("error")[0])
    check_run(campaign, run, campaign.launch(spec_of(campaign, run), takeover=True))
    assert {row.memory_step for row in campaign.rows(run, ClaimRow)} == {0, 23}
    assert repeated_rows(campaign, run) == 0


def repeated_rows(arena: Arena, run: str) -> int:
    """Return the rows that the ranks have trained more than once, by their own journals."""
    steps = [(entry["step"], entry["rank"], len(entry["rows"])) for entry in arena.entries(run)]
    return sum(rows for *_, rows in steps) - sum(rows for *_, rows in set(steps))


def kill_held(arena: Arena, launch: Launch, spec: JobSpec, victim: str, phase: str, attempt: int) -> Launch:
    """Kill ranks or the supervisor once all ranks hold in a phase of an attempt. Return the launch that recovers."""
    held = f"{spec.run}-{phase}-{attempt}-*"
    journal = arena.home / "journal"
    wait_until(lambda: len(list(journal.glob(held))) == 2 or launch.process.poll() is not None, what=f"two of {held}")
    assert launch.process.poll() is None, launch.stderr
    if victim == "supervisor":
        launch.destroy()
        return arena.launch(spec, takeover=True)
    for rank in launch.ranks()[victim == "rank" :]:
        os.kill(rank.pid, signal.SIGKILL)
    return launch


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "ranks", "supervisor"])
@pytest.mark.parametrize("repeats", [False, True])
def test_death_in_recovery_keeps_state(campaign: Arena, victim: str, repeats: bool) -> None:
    """Attempts that die in the load or in their first step leave the state to the next one. A second one does not."""
    run = f"memory-dies-{victim}-{repeats:d}"
    held = {"holds_loading": "2,3" if repeats else "2", "holds_training": "" if repeats else "3,4"}
    limits: dict[str, Any] = {"attempts_without_progress": 5, "memory_every_steps": 5, "pause_s": 0.01}
    spec = spec_of(campaign, run, deadlock_at=28, **held, **limits)
    launch, folder = campaign.launch(spec), memory_folder(spec)
    assert folder is not None
    wait_until(lambda: len({each["rank"] for each in campaign.entries(run) if each["step"] == 27}) == 2, what="step 27")
    time.sleep(0.3)
    os.kill(launch.ranks()[1].pid, signal.SIGKILL)
    for phase, attempts in held.items():
        for attempt in attempts.split(",") if attempts else ():
            launch = kill_held(campaign, launch, spec, victim, phase.removeprefix("holds_"), int(attempt))
    check_run(campaign, run, launch)
    claims = campaign.rows(run, ClaimRow)
    assert [row.memory_step for row in claims] == ([0, 25, 25, 0] if repeats else [0, 25, 25, 25, 25])
    assert repeated_rows(campaign, run) == (27 if repeats else 2) * _BATCH
    assert sum(each.rows_replayed for each in recoveries_of(campaign.lakehouse, run)) == repeated_rows(campaign, run)
