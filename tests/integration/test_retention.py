"""Old checkpoints are retired by the commit of a new one, and only retired checkpoints are ever removed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dlac_pipeline import TorchState, training_run
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.commit.retention import Retention
from dlac_pipeline.checkpoint.manifest import read_manifest
from dlac_pipeline.checkpoint.store import Tiers, folder_of
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints, verify_checkpoints
from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint, unname_checkpoint
from dlac_pipeline.lakehouse.errors import NoSuchCheckpoint, RunFinished, SpecInvalid, StoreUnavailable
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import (
    CheckpointRow,
    ClaimRow,
    LedgerRow,
    QuarantinedCheckpointRow,
    RetireRow,
    VerifyRow,
)
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.spec.job_spec import CheckpointSpec
from tests.conftest import Arena, wait_until
from tests.fixtures import Command

STEPS = [10, 20, 30, 40, 50, 60, 63]


def folders(arena: Arena, run: str) -> dict[int, Path]:
    """Return the existing folders of a run's checkpoints, by step."""
    found = {row.step: folder_of(row.manifest_uri) for row in arena.rows(run, CheckpointRow)}
    return {step: folder for step, folder in found.items() if folder.exists()}


def retired(arena: Arena, run: str) -> list[int]:
    """Steps of the checkpoints that are retired."""
    steps = {row.checkpoint_id: row.step for row in arena.rows(run, CheckpointRow)}
    return [steps[row.checkpoint_id] for row in arena.rows(run, RetireRow)]


def test_only_kept_checkpoints_remain(arena: Arena) -> None:
    """Newest and milestones stay; every other checkpoint has one retire row, and no folder."""
    arena.table()
    arena.train(arena.spec("r", world_size=1, passes=1, keep_last=2, keep_every_steps=20))
    kept = [20, 40, 60, 63]
    wait_until(lambda: sorted(folders(arena, "r")) == kept, what="the removal of the retired")
    assert sorted(retired(arena, "r")) == [step for step in STEPS if step not in kept]
    states = {each.step: each.state for each in list_checkpoints(arena.lakehouse, "r")}
    assert states == {step: "head" if step == 63 else "kept" if step in kept else "retired" for step in STEPS}
    assert all(verdict.problem is None for verdict in verify_checkpoints(arena.lakehouse, "r"))


@pytest.mark.slow
def test_a_retired_checkpoint_is_never_resumed_from(arena: Arena) -> None:
    """With the head damaged the run falls back to a kept checkpoint, even if the folder of a retired one still exists."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1, keep_last=2)
    arena.train(spec, until=35)
    wait_until(lambda: sorted(folders(arena, "r")) == [20, 30], what="the removal of the retired")
    (folders(arena, "r")[30] / "torch-state.pt").unlink()
    arena.train(spec, until=27)
    assert arena.lineage("r")[-1].step == 20
    states = {each.step: each.state for each in list_checkpoints(arena.lakehouse, "r")}
    assert states == {10: "retired", 20: "head", 30: "damaged"}


@pytest.mark.slow
def test_interrupted_removal_continues(arena: Arena) -> None:
    """The first checkpoint of an attempt removes retired folders and the remains of killed attempts."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1, keep_last=1)
    arena.train(spec, until=25)
    wait_until(lambda: sorted(folders(arena, "r")) == [20], what="the removal of the retired")
    (row,) = (row for row in arena.rows("r", CheckpointRow) if row.step == 10)
    half_removed = folder_of(row.manifest_uri)
    half_removed.mkdir()
    (half_removed / "left.pt").write_text("half removed")
    nonce = half_removed.name.rsplit("-", 1)[1]
    staged = half_removed.parent / f"step-000000030-{nonce}"
    shutil.copytree(folders(arena, "r")[20], staged)  # staged in attempt 1, never committed
    stranger = half_removed.parent.parent / "notes.txt"
    stranger.write_text("not a checkpoint")
    saved_by_hand = half_removed.parent.parent / "attempt-0001.bak" / "step-000000020-by-hand"
    saved_by_hand.mkdir(parents=True)
    foreign = half_removed.parent.parent / "attempt-0002" / "step-000000040-deadbeef"
    foreign.mkdir(parents=True)
    (foreign / "rng-00000.pt").write_text("being staged by a run of this name in another lakehouse")
    arena.train(spec, until=27)
    assert staged.exists()  # nothing is removed before a checkpoint is committed
    assert half_removed.exists()
    arena.train(spec, until=35)
    wait_until(lambda: not half_removed.parent.exists(), what="the removal of what was left over")
    assert sorted(folders(arena, "r")) == [30]
    assert stranger.exists()
    assert saved_by_hand.exists()
    assert foreign.exists()


def test_sweep_spares_own_attempt(tmp_path: Path) -> None:
    """The sweep removes files that an older attempt staged and never committed, and keeps files that its attempt is staging."""
    rows: list[LedgerRow] = [ClaimRow(nonce=nonce, marks_commits=True) for nonce in ("aaaa", "bbbb")]
    older = tmp_path / "r" / "attempt-0001" / "step-000000010-aaaa"
    own = tmp_path / "r" / "attempt-0002" / "step-000000020-bbbb"
    for folder in (older, own):
        folder.mkdir(parents=True)
        (folder / "rng-00000.pt").write_text("staged")
    tiers = Tiers(run="r", local=tmp_path, store=None, files=StoreFiles())
    Retention(CheckpointSpec(), tiers, 2, rows).sweep()
    assert (older.exists(), own.exists()) == (False, True)


def test_unrelated_checkpoints_are_retired(tmp_path: Path) -> None:
    """After a fallback, abandoned checkpoints are removed too. A quarantined one is kept for inspection."""

    def row(name: str, step: int, parent: str | None, **more: Any) -> CheckpointRow:
        uri = (tmp_path / name / "manifest.json").as_uri()
        return CheckpointRow(checkpoint_id=name, step=step, parent=parent, manifest_uri=uri, **more)

    rows: list[LedgerRow] = [row("a", 10, None), row("b", 20, "a"), row("c", 30, "b"), row("d", 40, "c")]
    rows.append(QuarantinedCheckpointRow(checkpoint_id="d"))
    rows.append(QuarantinedCheckpointRow())  # of a row group
    tiers = Tiers(run="r", local=tmp_path, store=None, files=StoreFiles())
    retention = Retention(CheckpointSpec(keep_last=2), tiers, 2, rows)
    assert retention.due("e", 50, "b") == ["a", "c"]
    assert retention.due("e", 20, "b") == ["c"]  # of one step, they count once


def test_store_outage_is_not_damage(arena: Arena, here: Command) -> None:
    """Damage found before the outage is recorded, and no other checkpoint: they are whole again when the store is back."""
    arena.table(appends=(500,))
    arena.train(arena.spec("r", world_size=1, passes=1, every_steps=5))
    store = folders(arena, "r")[16].parent
    verdicts = verify_checkpoints(arena.lakehouse, "r")
    assert next(verdicts).problem is None
    kept = store.rename(store.with_name("away"))
    with pytest.raises(StoreUnavailable, match="mount the store"):
        next(verdicts)
    assert here("checkpoint", "verify", "r", home=arena.home).returncode == StoreUnavailable.exit_code
    assert arena.rows("r", VerifyRow) == []
    kept.rename(store)
    assert [each.problem for each in verify_checkpoints(arena.lakehouse, "r")] == [None] * 4


@pytest.mark.slow
def test_retired_checkpoint_is_not_damage(arena: Arena) -> None:
    """`dlac checkpoint verify` beside a live run skips checkpoints that the run retires then, even an attempt's last one."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1, keep_last=2)
    arena.train(spec, until=15)
    arena.train(spec, until=25)
    verdicts = verify_checkpoints(arena.lakehouse, "r")
    assert next(verdicts).checkpoint.step == 20
    arena.train(spec)
    first = Path(spec.checkpoint.store) / spec.run / "attempt-0001"
    wait_until(lambda: not first.exists(), what="the removal of the first attempt's folder")
    assert list(verdicts) == []


def test_named_checkpoint_is_kept(arena: Arena) -> None:
    """Also one that is named while the run is on: the commit that would have retired it makes its rows again."""
    arena.table()
    spec = arena.spec("r", world_size=1, passes=1, keep_last=1)
    ledger = Ledger(arena.lakehouse)
    arena.train(spec, until=15)
    name_checkpoint(ledger, "r", "release-1")
    with training_run(arena.home / "r.yaml") as run:
        run.restore(TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            run.step_done(0.0)
            if batch.step == 31:
                name_checkpoint(ledger, "r", "release-2")
            if batch.step == 41:
                row = arena.lineage("r")[-1]
                manifest = read_manifest(row.manifest_uri, row.manifest_digest, StoreFiles())
                repeated = [each["checkpoint_id"] for each in manifest.ledger_rows if each["kind"] == "name"]
                unname_checkpoint(ledger, "r", "release-1")
    wait_until(lambda: sorted(folders(arena, "r")) == [30, 63], what="the removal of the retired")
    names = {each.step: (each.names, each.state) for each in list_checkpoints(arena.lakehouse, "r")}
    assert names[30] == (["release-2"], "kept")
    assert names[10] == ([], "retired")
    assert audit_run(arena.lakehouse, "r").exact
    seqs = [row.seq for row in arena.rows("r")]
    assert sorted(set(seqs)) == list(range(1, max(seqs) + 1))
    assert repeated == [row.checkpoint_id for row in arena.lineage("r") if row.step == 30]


def test_names_are_refused_where_they_would_mislead(arena: Arena, here: Command) -> None:
    """A retired checkpoint, a step without one, a name that is taken, and one that nothing has."""
    arena.table(appends=(800,))
    spec = arena.spec("r", world_size=1, passes=1, keep_last=2)
    arena.train(spec)
    ledger = Ledger(arena.lakehouse)
    with pytest.raises(NoSuchCheckpoint, match=r"at step 10 that is kept, found those of steps \[20, 25\]"):
        name_checkpoint(ledger, "r", "early", step=10)
    named = here("checkpoint", "tag", "r", "best", "--step", "20", home=arena.home)
    assert "is tagged best" in named.stdout
    assert name_checkpoint(ledger, "r", "best", step=20) in named.stdout  # again: nothing to do
    with pytest.raises(SpecInvalid, match="'best' to tag no checkpoint"):
        name_checkpoint(ledger, "r", "best")
    assert here("checkpoint", "untag", "r", "best", home=arena.home).returncode == 0
    with pytest.raises(NoSuchCheckpoint, match=r"with tag 'best', found the tags \[\]"):
        unname_checkpoint(ledger, "r", "best")
    with pytest.raises(RunFinished):
        arena.train(spec)
    assert audit_run(arena.lakehouse, "r").exact
