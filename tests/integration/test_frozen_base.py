"""A frozen base is stored once per attempt: later checkpoints have its file by a link, or refer to it in the store."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch
from torch import nn

import dlac_pipeline as dlac
from dlac_pipeline import DistributedState, TorchState
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.commit.retention import Retention
from dlac_pipeline.checkpoint.manifest import read_manifest
from dlac_pipeline.checkpoint.store import folder_of, tiers_of
from dlac_pipeline.extensions.exchange.fork import fork_run
from dlac_pipeline.extensions.kept_checkpoints.listing import verify_checkpoints
from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint, unname_checkpoint
from dlac_pipeline.lakehouse.errors import CheckpointDamaged
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, QuarantinedCheckpointRow, RetireRow
from dlac_pipeline.lakehouse.store_files import StoreFiles
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, wait_until
from tests.object_store import ObjectStore

BASE = "torch-frozen.pt"
ENGINES = pytest.mark.parametrize("engine", [TorchState, DistributedState])


class Adapted(nn.Module):
    """A frozen base of 1.4 MB and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.Linear(600, 600).requires_grad_(False)
        self.adapter = nn.Linear(600, 1)


def train(
    arena: Arena,
    spec: JobSpec,
    engine: type[Any] = TorchState,
    *,
    until: int = 0,
    change: Callable[[int, Any], None] = lambda step, model: None,
) -> dict[str, torch.Tensor]:
    """Train the adapter. The process "dies" in step `until`. `change` is called after each step. Return the weights."""
    model = Adapted()
    optimizer = torch.optim.Adam(model.adapter.parameters())
    with arena.training_run(spec) as run:
        run.restore(engine(model=model, optimizer=optimizer))
        for batch in run.batches():
            if batch.step == until:
                break
            loss = model.adapter(model.base(torch.full((1, 600), float(batch.step)))).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            change(batch.step, model)
            run.step_done(loss)
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


@pytest.fixture
def spec(arena: Arena) -> JobSpec:
    """A run of 23 steps with a checkpoint every 3, made in one folder and copied to another."""
    arena.table(appends=(70, 50), row_group_rows=20)
    places = {"local": str(arena.home / "near"), "store": str(arena.home / "far")}
    return arena.spec("r1", world_size=1, batch_size=16, key_groups=4, every_steps=3, passes=3, **places)


def with_settings(spec: JobSpec, **settings: Any) -> JobSpec:
    """Return the spec with other settings of checkpoints."""
    return spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=settings)})


def steps_of_bases(arena: Arena, spec: JobSpec, run: str = "r1") -> dict[int, int | None]:
    """Return the step of the folder that has the base of each checkpoint in the store, or None without one."""
    found: dict[int, int | None] = {}
    for row in arena.rows(run, CheckpointRow):
        if row.checkpoint_id not in {each.checkpoint_id for each in arena.rows(run, RetireRow)}:
            manifest = read_manifest(row.manifest_uri, row.manifest_digest, tiers_of(spec).files)
            folders = {entry.folder for entry in manifest.files if "frozen" in entry.path}
            found[row.step] = int(folders.pop().split("-")[2]) if folders else None
    return found


def folders(place: Path) -> list[int]:
    """Return the steps of the folders in a place."""
    return sorted(int(each.name.split("-")[1]) for each in place.glob("r1/attempt-*/step-*"))


def check_whole(arena: Arena, spec: JobSpec) -> None:
    """Check each file of each checkpoint that is kept."""
    verdicts = verify_checkpoints(arena.lakehouse, "r1", files=tiers_of(spec).files)
    assert [each.problem for each in verdicts if each.problem] == []


@ENGINES
@pytest.mark.parametrize("places", [1, 2])
def test_base_is_stored_once(arena: Arena, spec: JobSpec, engine: type[Any], places: int) -> None:
    """Four checkpoints take one base in each place. The next attempt resumes from the last one, equal in every bit."""
    if places == 1:
        spec = with_settings(spec, store=spec.checkpoint.local)
    base = train(arena, spec, engine, until=13)["base.weight"].nbytes
    for place in {spec.checkpoint.local, spec.checkpoint.store}:
        files = [each.stat() for each in Path(place).rglob("*") if each.is_file()]
        assert base < sum({each.st_ino: each.st_size for each in files}.values()) < 1.3 * base
    shutil.rmtree(Path(spec.checkpoint.local) / "r1" / "locks", ignore_errors=True)
    resumed = train(arena, spec, engine)
    alone = train(arena, spec.model_copy(update={"run": "r2"}), engine)
    assert all(torch.equal(each, resumed[name]) for name, each in alone.items())
    assert audit_run(arena.lakehouse, "r1").exact
    check_whole(arena, spec)


def test_object_store_has_one_base(arena: Arena, spec: JobSpec, store: ObjectStore) -> None:
    """Of an attempt, one base is uploaded. A machine without files resumes from there, and whole files are exported."""
    spec = with_settings(spec, store="s3://lake/checkpoints", store_properties=store.properties())
    train(arena, spec, until=13)
    found = store.files.get_file_info(pafs.FileSelector("lake/checkpoints/r1", recursive=True))
    assert [each.base_name for each in found].count(BASE) == 1
    shutil.rmtree(arena.home / "near")
    resumed = train(arena, spec)
    alone = train(arena, spec.model_copy(update={"run": "r2"}))
    assert all(torch.equal(each, resumed[name]) for name, each in alone.items())
    check_whole(arena, spec)


@ENGINES
@pytest.mark.parametrize("how", ["written", "thawed"])
def test_changed_base_is_stored_again(arena: Arena, spec: JobSpec, engine: type[Any], how: str) -> None:
    """A write that makes no version is found. A base that is thawed is an ordinary part of the state."""

    def change(step: int, model: Any) -> None:
        if step == 8 and how == "written":
            model.base.weight.data[300, 300] += 1
        elif step == 8:
            model.base.requires_grad_(True)

    weights = train(arena, spec, engine, until=16, change=change)
    own = 9 if how == "written" else None
    assert steps_of_bases(arena, spec) == {3: 3, 6: 3, 9: own, 12: own, 15: own}
    shutil.rmtree(arena.home / "near")
    resumed = train(arena, spec, engine, until=16)
    assert all(torch.equal(each, resumed[name]) for name, each in weights.items())


def test_file_systems_without_links(arena: Arena, spec: JobSpec) -> None:
    """Where no hard link can be made, every checkpoint has its own base."""

    def refuse(*args: Any) -> None:
        raise PermissionError

    arena.monkeypatch.setattr("dlac_pipeline.checkpoint.stage.durable_writer.os.link", refuse)
    train(arena, spec, until=7)
    assert steps_of_bases(arena, spec) == {3: 3, 6: 6}


def test_retention_keeps_referred_folders(arena: Arena, spec: JobSpec) -> None:
    """The folder of a retired checkpoint stays while a kept or tagged one refers to it, and goes with the last of them."""
    spec, far = with_settings(spec, keep_last=2), arena.home / "far"
    train(arena, spec, until=13)
    assert steps_of_bases(arena, spec) == {9: 3, 12: 3}
    wait_until(lambda: folders(far) == [3, 9, 12], what="the removal of step 6")
    name_checkpoint(Ledger(arena.lakehouse), "r1", "best", step=9)
    train(arena, spec, until=19)
    assert steps_of_bases(arena, spec) == {9: 3, 15: 15, 18: 15}
    wait_until(lambda: folders(far) == [3, 9, 15, 18], what="the removal of step 12")
    check_whole(arena, spec)
    unname_checkpoint(Ledger(arena.lakehouse), "r1", "best")
    train(arena, spec)
    wait_until(lambda: folders(far) == [21, 23], what="the removal of all that nothing refers to")
    check_whole(arena, spec)


def test_abandoned_branch_keeps_its_base(arena: Arena, spec: JobSpec) -> None:
    """After a rewind, checkpoints of both branches are whole. The old base goes when the old branch is retired."""
    spec, far = with_settings(spec, keep_last=1), arena.home / "far"
    train(arena, spec, until=7)
    name_checkpoint(Ledger(arena.lakehouse), "r1", "first", step=6)
    train(arena, spec, until=13)
    dlac.rewind_run(arena.lakehouse, "r1", nonce="n", step=6, exclude=["row_id = 119"], spec=spec)
    train(arena, spec)
    assert steps_of_bases(arena, spec) == {6: 3, 12: 9, 23: 9}
    wait_until(lambda: folders(far) == [3, 6, 9, 9, 12, 23], what="the removal of the retired")
    check_whole(arena, spec)
    dlac.retire_checkpoints(arena.lakehouse, "r1", spec)
    assert folders(far) == [3, 6, 9, 23]
    check_whole(arena, spec)


def test_damaged_base_is_left_behind(arena: Arena, spec: JobSpec) -> None:
    """All checkpoints that refer to a damaged base are quarantined by one look at it. The next one has a base of its own."""
    train(arena, spec, until=7)
    train(arena, spec, until=16)
    (base,) = (arena.home / "far").glob(f"r1/attempt-0002/*/{BASE}")
    base.write_bytes(base.read_bytes()[::-1])
    shutil.rmtree(arena.home / "near")
    train(arena, spec, until=10)
    quarantined = arena.rows("r1", QuarantinedCheckpointRow)
    assert [f"{base.as_uri()!r} to have digest" in row.reason for row in quarantined] == [True] * 3
    assert sum("found another one before" in row.reason for row in quarantined) == 2
    assert arena.lineage("r1")[-1].parent == arena.lineage("r1")[1].checkpoint_id
    check_whole(arena, spec)


def test_linked_file_is_digested_once(arena: Arena, spec: JobSpec) -> None:
    """In one place, checkpoints that share a damaged file are refused without another look at its content."""
    spec = with_settings(spec, store=spec.checkpoint.local)
    train(arena, spec, until=10)
    paths = sorted((arena.home / "near").glob(f"r1/*/*/{BASE}"))
    paths[0].write_bytes(paths[0].read_bytes()[::-1])
    looks = []

    class Files(StoreFiles):
        def digest(self, address: str) -> tuple[int, str]:
            looks.append(address)
            return super().digest(address)

    files = Files()
    verdicts = list(verify_checkpoints(arena.lakehouse, "r1", files=files))
    assert [each.problem is None for each in verdicts] == [False] * 3
    assert sum(each.endswith(BASE) for each in looks) == 1


def test_fork_has_files_of_its_own(arena: Arena, spec: JobSpec) -> None:
    """A fork of a checkpoint that refers to another one continues equally, after the parent's files are gone."""
    train(arena, spec, until=7)
    other = spec.model_copy(update={"run": "r2"})
    fork_run(arena.lakehouse, other, "r1", step=6)
    shutil.rmtree(arena.home / "far" / "r1")
    shutil.rmtree(arena.home / "near")
    forked = train(arena, other, until=2)
    assert steps_of_bases(arena, other, "r2") == {0: 0}
    assert not torch.equal(forked["adapter.weight"], Adapted().adapter.weight)


def test_retired_parent_refuses_commit(arena: Arena, spec: JobSpec) -> None:
    """A checkpoint cannot refer to one that an operator has retired meanwhile, because its files may be gone."""
    train(arena, spec, until=4)
    rows = arena.rows("r1")
    (row,) = arena.lineage("r1")
    name = "/".join(folder_of(row.manifest_uri).parts[-2:])
    Retention(spec.checkpoint, tiers_of(spec), 1, rows).check_kept([name])
    rows.append(RetireRow(checkpoint_id=row.checkpoint_id))
    with pytest.raises(CheckpointDamaged, match=r"retired: start the run again"):
        Retention(spec.checkpoint, tiers_of(spec), 1, rows).check_kept([name])
