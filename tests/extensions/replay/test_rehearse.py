"""Rehearsals of runs that real ranks trained: identical, different or impossible. They do not change the run."""

import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from dlac_pipeline.checkpoint.store import folder_of
from dlac_pipeline.dagster.training_runs import model_key
from dlac_pipeline.extensions.look.live_status import LiveStatus
from dlac_pipeline.extensions.replay.rehearse import rehearse_run
from dlac_pipeline.extensions.replay.replay import PREFIX
from dlac_pipeline.lakehouse.errors import CheckpointDamaged
from dlac_pipeline.lakehouse.ledger.run_rows import claim_of
from dlac_pipeline.supervise.claims import spec_of_attempt
from jobs.definitions import defs
from tests.conftest import Arena, wait_until
from tests.integration.test_cli import dlac

Seen = tuple[object, dict[str, tuple[int, int]], set[str]]


@pytest.fixture(autouse=True)
def own_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A temporary folder without other rehearsals, with a short path, because it has sockets."""
    with tempfile.TemporaryDirectory(prefix="dlac-tests-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield


def production(arena: Arena, run: str) -> Seen:
    """Return the ledger's snapshot, the run's files with size and time of change, and the sandboxes."""
    folder = arena.home / "checkpoints" / run
    files = {str(path): (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}
    snapshot = arena.lakehouse.own("consumption").current_snapshot()
    sandboxes = {path.name for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")}
    return (None if snapshot is None else snapshot.snapshot_id, files, sandboxes)


@pytest.mark.soak
def test_rehearsal_is_identical_and_clean(campaign: Arena) -> None:
    """`dlac rehearse` compares every loss after the last checkpoint with a successor. Ledger, files and journal stay."""
    before, entries = production(campaign, "reference"), len(campaign.entries("reference"))
    done = dlac("rehearse", "reference", "--json", home=campaign.home)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    parent, head = campaign.lineage("reference")[-2:]
    assert (report["checkpoint_id"], report["successor"]) == (parent.checkpoint_id, head.checkpoint_id)
    assert (report["world_size"], report["identical"], report["config_changed"]) == (2, True, False)
    assert [step["step"] for step in report["steps"]] == list(range(parent.step + 1, head.step + 1))
    assert [step["replayed"] for step in report["steps"]] == list(head.losses)
    assert production(campaign, "reference") == before
    assert len(campaign.entries("reference")) == entries


@pytest.mark.soak
def test_damaged_checkpoint_is_named(campaign: Arena) -> None:
    """The error names the file with a flipped byte. Only a recovery quarantines the checkpoint."""
    folder = folder_of(campaign.lineage("reference")[-2].manifest_uri)
    victim = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    content = victim.read_bytes()
    try:
        victim.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        before = production(campaign, "reference")
        with pytest.raises(CheckpointDamaged, match=victim.name):
            rehearse_run(campaign.lakehouse, "reference")
        assert production(campaign, "reference") == before
    finally:
        victim.write_bytes(content)


@pytest.mark.soak
def test_live_run_is_rehearsed_and_continues(campaign: Arena) -> None:
    """The run trains on during an identical rehearsal, and its batches equal the undisturbed run's."""
    launch = campaign.launch(campaign.spec("watched", pause_s=0.15))
    launch.wait_for("checkpoint", 2)
    status = LiveStatus(campaign.lakehouse, "watched")
    first = status.look()
    wait_until(lambda: status.look()["step"] > first["step"] + 1, what="another step")
    now = status.look()
    assert now["state"] in ("reading", "computing", "training", "checkpoint")
    assert (now["attempt"], now["total_steps"]) == (1, 125)
    assert 0 <= now["at_risk_steps"] <= 11
    assert now["samples_per_s"] > 0
    assert 0 < now["eta_s"] < 3600
    assert now["consumed_share"] == pytest.approx(now["step"] * 32 / 2000, abs=0.02)
    rehearsed = rehearse_run(campaign.lakehouse, "watched", steps=3)
    assert rehearsed.identical, rehearsed.summary()
    os.kill(launch.process.pid, signal.SIGTERM)
    assert launch.wait() == 0, launch.stderr
    assert len(launch.of("attempt")) == 1
    reference = campaign.journal("reference")
    assert campaign.journal("watched") == {step: reference[step] for step in campaign.journal("watched")}


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore")  # Dagster's own libraries cause warnings
def test_rehearsal_job_covers_every_run(arena: Arena, tmp_path: Path) -> None:
    """Of two runs and an unknown name the identical one passes its check, and another environment fails by run and step."""
    arena.table(appends=(192,))
    specs = [arena.spec(run, world_size=1, passes=1, every_steps=2) for run in ("steady", "drifts")]
    for spec in specs:
        assert arena.launch(spec).wait() == 0
    arena.monkeypatch.setenv("DLAC_HOME", str(arena.home))
    job = defs.resolve_job_def("rehearse_job")

    def evaluations(**config: Any) -> list[dg.AssetCheckEvaluation]:
        with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"telemetry": {"enabled": False}}) as instance:
            done = job.execute_in_process(
                instance=instance, run_config={"ops": {"runs_to_rehearse": {"config": {"steps": 2, **config}}}}
            )
            assert done.success
            ops = [event.step_key or "" for event in done.get_step_success_events()]
            assert sum(key.startswith("rehearsal[") for key in ops) == len(config.get("runs", specs))
            runs = [spec.run for spec in specs]
            keys = [dg.AssetCheckKey(model_key(run), "rehearsal_identical") for run in (*runs, "unknown")]
            kept = instance.event_log_storage.get_latest_asset_check_execution_by_key(keys)
            assert len(kept) == len(specs)
            return [record.evaluation for key in keys if (record := kept.get(key)) and record.evaluation]

    for each in evaluations():
        assert each.passed
        assert "2 losses bit-identical" in (each.description or "")
    launched = spec_of_attempt(arena.lakehouse, arena.rows("drifts"), "drifts", 1)
    changed = launched.model_copy(update={"launch": launched.launch.model_copy(update={"env": {"NOISE_SEED": "1"}})})
    (Path(claim_of(arena.rows("drifts"), 1).launch_folder) / "spec.json").write_text(changed.model_dump_json())
    identical, differing = evaluations(runs=["steady", "drifts", "unknown"])
    assert identical.passed
    assert (differing.passed, differing.severity) == (False, dg.AssetCheckSeverity.ERROR)
    assert "2 of 2 losses differ" in (differing.description or "")
    assert differing.metadata["compared"].value == 2
