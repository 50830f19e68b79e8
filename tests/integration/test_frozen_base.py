"""A frozen base is stored once per attempt: later checkpoints have its file by a link, or refer to it in the store."""

import shutil
from collections.abc import Callable
from functools import partialmethod
from typing import Any
from unittest.mock import Mock

import pyarrow.fs as pafs
import pytest
import torch
from torch import nn

import dlac_pipeline as dlac
from dlac_pipeline import DistributedState, TorchState
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.manifest import read_manifest
from dlac_pipeline.checkpoint.store import tiers_of
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

ENGINES = pytest.mark.parametrize("engine", [TorchState, DistributedState])
Change = Callable[[int, Any], object]


def train(
    arena: Arena, spec: JobSpec, until: int = 0, engine: Any = TorchState, change: Change = lambda step, model: None
) -> dict[str, Any]:
    """Train an adapter of a base of 1.4 MB. The process "dies" in step `until`. Return the weights after the last step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(600, 600).requires_grad_(False), nn.Linear(600, 1))
    optimizer = torch.optim.Adam(model[1].parameters())
    with arena.training_run(spec) as run:
        run.restore(engine(model=model, optimizer=optimizer))
        for batch in run.batches():
            if batch.step == until:
                break
            optimizer.zero_grad()
            model(torch.full((1, 600), float(batch.step))).sum().backward()
            optimizer.step()
            change(batch.step, model)
            run.step_done(0.0)
    return model.state_dict()


def spec_of(arena: Arena, **settings: Any) -> JobSpec:
    """Return a run of 23 steps with a checkpoint every 3, made in one folder and copied to another."""
    arena.table(appends=(70, 50), row_group_rows=20)
    settings = {"local": str(arena.home / "near"), "store": str(arena.home / "far"), "every_steps": 3, **settings}
    return arena.spec("r1", world_size=1, batch_size=16, key_groups=4, passes=3, **settings)


def bases(arena: Arena, spec: JobSpec) -> dict[int, int | None]:
    """Check each file of each kept checkpoint. Return step -> step of the folder that has its base, None without one."""
    assert not any(each.problem for each in verify_checkpoints(arena.lakehouse, spec.run, files=tiers_of(spec).files))
    gone = {each.checkpoint_id for each in arena.rows(spec.run, RetireRow)}
    found: dict[int, int | None] = {}
    for row in arena.rows(spec.run, CheckpointRow):
        if row.checkpoint_id not in gone:
            files = read_manifest(row.manifest_uri, row.manifest_digest, tiers_of(spec).files).files
            found[row.step] = next((int(each.folder.split("-")[2]) for each in files if each.folder), None)
    return found


def wait_for_folders(arena: Arena, *steps: int) -> None:
    """Wait until the store has the folders of these steps only."""
    far = arena.home / "far"
    wait_until(lambda: sorted(int(each.name[5:14]) for each in far.glob("*/*/step-*")) == [*steps], what=f"{steps}")


@ENGINES
@pytest.mark.parametrize("places", ["one", *(pytest.param(each, marks=pytest.mark.slow) for each in ("two", "bucket"))])
def test_base_is_stored_once(arena: Arena, places: str, engine: Any, store: ObjectStore) -> None:
    """Four checkpoints take one base in each place. The next attempt resumes from the last one, equal in every bit."""
    bucket: dict[str, Any] = {"store": "s3://lake/checkpoints", "store_properties": store.properties()}
    spec = spec_of(arena, **{"one": {"store": str(arena.home / "near")}, "two": {}, "bucket": bucket}[places])
    base = train(arena, spec, 13, engine)["0.weight"].nbytes
    for place in (each for each in (arena.home / "near", arena.home / "far") if each.exists()):
        files = [each.stat() for each in place.rglob("*") if each.is_file()]
        assert base < sum({each.st_ino: each.st_size for each in files}.values()) < 1.3 * base
    if places == "bucket":
        objects = store.files.get_file_info(pafs.FileSelector("lake/checkpoints/r1", recursive=True))
        assert sum("frozen" in each.base_name for each in objects) == 1
        shutil.rmtree(arena.home / "near")
    resumed, alone = (train(arena, spec.model_copy(update={"run": run}), engine=engine) for run in ("r1", "r2"))
    assert all(torch.equal(each, resumed[name]) for name, each in alone.items())
    assert audit_run(arena.lakehouse, "r1").exact
    assert len(bases(arena, spec)) == 8


@ENGINES
@pytest.mark.parametrize(
    ("how", "own"),
    [("written", [3, 3, 9, 9, 9]), ("thawed", [3, 3, None, None, None]), ("unlinked", [3, 6, 9, 12, 15])],
)
def test_changed_base_is_stored_again(arena: Arena, engine: Any, how: str, own: list[int | None]) -> None:
    """A write that makes no version is found, and a file system without links. A thawed base is no file of its own."""
    spec = spec_of(arena)

    def change(step: int, model: Any) -> None:
        if step == 8 and how == "written":
            model[0].weight.data[300, 300] += 1
        elif step == 8 and how == "thawed":
            model.requires_grad_(True)

    if how == "unlinked":
        arena.monkeypatch.setattr("dlac_pipeline.checkpoint.stage.durable_writer.os.link", Mock(side_effect=OSError))
    weights = train(arena, spec, 16, engine, change)
    assert [*bases(arena, spec).values()] == own
    shutil.rmtree(arena.home / "near")
    resumed = train(arena, spec, 16, engine)
    assert all(torch.equal(each, resumed[name]) for name, each in weights.items())


def test_retention_keeps_referred_folders(arena: Arena) -> None:
    """The folder of a retired checkpoint stays while a kept or tagged one refers to it, and goes with the last of them."""
    spec = spec_of(arena, keep_last=2)
    train(arena, spec, 13)
    assert bases(arena, spec) == {9: 3, 12: 3}
    wait_for_folders(arena, 3, 9, 12)
    name_checkpoint(Ledger(arena.lakehouse), "r1", "best", step=9)
    train(arena, spec, 19)
    assert bases(arena, spec) == {9: 3, 15: 15, 18: 15}
    wait_for_folders(arena, 3, 9, 15, 18)
    unname_checkpoint(Ledger(arena.lakehouse), "r1", "best")
    train(arena, spec)
    assert bases(arena, spec) == {21: 21, 23: 21}
    wait_for_folders(arena, 21, 23)


def test_abandoned_branch_keeps_its_base(arena: Arena) -> None:
    """After a rewind, checkpoints of both branches are whole. The old base goes when the old branch is retired."""
    spec = spec_of(arena, keep_last=1)
    train(arena, spec, 7)
    name_checkpoint(Ledger(arena.lakehouse), "r1", "first", step=6)
    train(arena, spec, 13)
    dlac.rewind_run(arena.lakehouse, "r1", nonce="n", target=6, exclude=["row_id = 119"], spec=spec)
    train(arena, spec)
    assert bases(arena, spec) == {6: 3, 12: 9, 23: 9}
    wait_for_folders(arena, 3, 6, 9, 9, 12, 23)
    dlac.retire_checkpoints(arena.lakehouse, "r1", spec)
    wait_for_folders(arena, 3, 6, 9, 23)
    assert bases(arena, spec) == {6: 3, 23: 9}


@pytest.mark.parametrize("place", ["near", "far"])
def test_damaged_base_is_left_behind(arena: Arena, place: str) -> None:
    """Checkpoints that refer to a damaged base are quarantined after one look at it. The next one has a base of its own."""
    spec, looks = spec_of(arena, store=str(arena.home / place)), list[str]()
    train(arena, spec, 7)
    train(arena, spec, 16)
    base = min((arena.home / place).glob("r1/attempt-0002/*/torch-frozen.pt"))
    base.write_bytes(base.read_bytes()[::-1])

    def look(files: StoreFiles, real: Any, address: str, *target: Any) -> Any:
        looks.append(address)
        return real(files, address, *target)

    for name in ("fetch", "digest"):
        arena.monkeypatch.setattr(StoreFiles, name, partialmethod(look, getattr(StoreFiles, name)))
    if place == "far":
        shutil.rmtree(arena.home / "near")
    train(arena, spec, 10)
    assert ["torch-frozen.pt" in row.reason for row in arena.rows("r1", QuarantinedCheckpointRow)] == [True] * 3
    assert sum(f"{place}/r1/attempt-0002" in each and "frozen" in each for each in looks) == 1
    assert arena.lineage("r1")[-1].parent == arena.lineage("r1")[1].checkpoint_id


def test_fork_has_files_of_its_own(arena: Arena) -> None:
    """A fork of a checkpoint that refers to another one is whole after the parent's files are gone."""
    spec = spec_of(arena)
    weights = train(arena, spec, 7)
    spec = spec.model_copy(update={"run": "r2"})
    fork_run(arena.lakehouse, spec, "r1", step=6)
    shutil.rmtree(arena.home / "far" / "r1")
    shutil.rmtree(arena.home / "near")
    forked = train(arena, spec, 1)
    assert all(torch.equal(each, forked[name]) for name, each in weights.items())
    assert bases(arena, spec) == {0: 0}


def test_retired_parent_refuses_commit(arena: Arena) -> None:
    """A checkpoint cannot refer to one that an operator has retired meanwhile, because its files may be gone."""

    def retire(step: int, model: Any) -> None:
        if step == 4:
            dlac.retire_checkpoints(arena.lakehouse, "r1", None, whole=True)

    with pytest.raises(CheckpointDamaged, match="retired them: start the run again"):
        train(arena, spec_of(arena), change=retire)
