"""A checkpoint's copies: made on this node, durable in the store, repaired from there, and one is enough to resume."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from dlac_pipeline import DistributedState, TorchState
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint import store
from dlac_pipeline.checkpoint.restore.verified_copy import restore
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints, verify_checkpoints
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, StoreUnavailable
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import QuarantinedCheckpointRow, RetireRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, wait_until
from tests.fixtures import Command


@pytest.fixture
def spec(arena: Arena) -> JobSpec:
    """A run of 15 steps with a checkpoint every 5, made in one folder and copied to another."""
    arena.table(appends=(70, 50), row_group_rows=20)
    places = {"store": str(arena.home / "far"), "local": str(arena.home / "near")}
    return arena.spec("r1", world_size=1, batch_size=16, key_groups=4, every_steps=5, **places)


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints with a manifest in a folder."""
    return sorted(int(path.parent.name.split("-")[1]) for path in folder.glob("r1/attempt-*/step-*/manifest.json"))


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def file_of(folder: Path, step: int, name: str = "torch-state.pt") -> Path:
    """A file of a step's checkpoint."""
    (path,) = folder.glob(f"r1/attempt-*/step-{step:09d}-*/{name}")
    return path


def test_store_has_all_and_local_newest(arena: Arena, spec: JobSpec, here: Command) -> None:
    """Copies of the newest two stay here, and `dlac checkpoint list` names them. Logs and locks are stored here alone."""
    arena.train(spec)
    near, far = arena.home / "near", arena.home / "far"
    assert steps(far) == [5, 10, 15]
    assert steps(near) == [10, 15]
    assert file_of(near, 15).read_bytes() == file_of(far, 15).read_bytes()
    assert [(each.step, each.tiers) for each in list_checkpoints(arena.lakehouse, "r1")] == [
        (5, ["store"]),
        (10, ["local", "store"]),
        (15, ["local", "store"]),
    ]
    assert all(row.manifest_uri.startswith(far.as_uri()) for row in arena.lineage("r1"))
    mark = f"committed-{Ledger(arena.lakehouse).table_uuid}.json"
    assert {path.name for path in (far / "r1").iterdir()} == {".dlac", "attempt-0001", mark}
    assert not list(arena.home.rglob("*.tmp-*"))
    listed = json.loads(here("checkpoint", "list", "r1", "--json", home=arena.home).stdout)
    assert [each["tiers"] for each in listed] == [["store"], ["local", "store"], ["local", "store"]]


@pytest.mark.parametrize("lost", ["a bit", pytest.param("everything", marks=pytest.mark.slow)])
def test_missing_local_files_come_from_store(arena: Arena, spec: JobSpec, lost: str) -> None:
    """Only files that are lost here are fetched, nothing is quarantined, and the run resumes exactly."""
    arena.train(spec, until=8)
    near = arena.home / "near"
    folder = file_of(near, 5).parent
    names = {path.name for path in folder.iterdir()}
    if lost == "a bit":
        flip(file_of(near, 5))
    else:
        shutil.rmtree(near)
    (row,) = arena.lineage("r1")
    found = restore(row, tiers_of(spec))
    assert set(found.fetched) == ({"torch-state.pt"} if lost == "a bit" else names - {"manifest.json"})
    assert restore(row, tiers_of(spec)).fetched == []
    assert {path.name for path in folder.iterdir()} == names
    assert min(arena.train(spec)) == 6
    assert audit_run(arena.lakehouse, "r1").exact
    assert arena.rows("r1", QuarantinedCheckpointRow) == []


def test_a_whole_local_copy_needs_no_store(arena: Arena, spec: JobSpec) -> None:
    """With the store's copy damaged, a restart here loads the local copy. `dlac checkpoint verify` names the damaged file."""
    arena.train(spec, until=8)
    damaged = file_of(arena.home / "far", 5)
    flip(damaged)
    (row,) = arena.lineage("r1")
    assert restore(row, tiers_of(spec)).fetched == []
    (verdict,) = verify_checkpoints(arena.lakehouse, "r1")
    assert verdict.problem is not None
    assert damaged.as_uri() in verdict.problem
    shutil.rmtree(arena.home / "near")
    with pytest.raises(CheckpointDamaged, match=damaged.as_uri()):
        restore(row, tiers_of(spec))


@pytest.mark.slow
def test_with_both_copies_damaged_the_parent_is_resumed(arena: Arena, spec: JobSpec) -> None:
    """If no copy is whole, the checkpoint is quarantined and the run resumes at the one before."""
    arena.train(spec, until=13)
    flip(file_of(arena.home / "far", 10))
    shutil.rmtree(arena.home / "near")
    assert min(arena.train(spec)) == 6
    (row,) = arena.rows("r1", QuarantinedCheckpointRow)
    assert "torch-state.pt" in row.reason
    assert audit_run(arena.lakehouse, "r1").exact


def test_retired_checkpoints_leave_both_places(arena: Arena, spec: JobSpec) -> None:
    """A checkpoint that is retired in the store has no copy here either, however many may be kept."""
    arena.train(spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"keep_last": 1})}))
    both = [arena.home / "far", arena.home / "near"]
    wait_until(lambda: [steps(each) for each in both] == [[15], [15]], what="the removal of the retired")


@pytest.mark.slow
def test_every_machine_has_verified_copy(arena: Arena, spec: JobSpec) -> None:
    """Two ranks write parts in local folders of their machines. Resumed, the second fetches all files from the store."""
    machines, path = arena.home / "machines", arena.home / "r1.yaml"
    names = {"manifest.json", "torch-state.pt", "rng-00000.pt", "rng-00001.pt"}

    def launch(**params: str) -> subprocess.CompletedProcess[str]:
        params |= {**spec.params, "machines": str(machines)}
        path.write_text(yaml.safe_dump({**spec.model_dump(), "params": params}))
        torchrun = [str(Path(sys.executable).with_name("torchrun")), "--standalone", "--nproc-per-node", "2"]
        command = [*torchrun, str(arena.program("train_on_nodes.py")), str(path)]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)

    def files(folder: Path) -> set[str]:
        return {path.name for path in folder.glob("r1/attempt-0001/step-*/*")}

    assert launch(dies_at="8").returncode == 1
    assert (files(arena.home / "far"), files(machines / "1")) == (names, {"rng-00001.pt"})
    assert launch(dies_at="13").returncode == 1
    assert files(machines / "1") == names
    done = launch()
    assert done.returncode == 0, done.stderr
    assert audit_run(arena.lakehouse, "r1").exact
    assert [row.attempt for row in arena.lineage("r1")] == [1, 2, 3]


def test_new_store_ignores_old_one(arena: Arena, spec: JobSpec) -> None:
    """A run whose checkpoints lay in the folder that is only the local one now keeps them: the store has no copies of these."""
    near = arena.home / "near"
    alone = spec.checkpoint.model_copy(update={"store": str(near), "local": str(near)})
    arena.train(spec.model_copy(update={"checkpoint": alone}), until=8)
    arena.train(spec)
    assert steps(near) == [5, 10, 15]
    assert steps(arena.home / "far") == [10, 15]
    assert all(verdict.problem is None for verdict in verify_checkpoints(arena.lakehouse, "r1"))


@pytest.mark.parametrize(
    ("gone", "mode", "engine"),
    [
        ("far", "asynchronous", TorchState),
        pytest.param("near", "synchronous", TorchState, marks=pytest.mark.slow),
        pytest.param("both", "synchronous", DistributedState, marks=pytest.mark.slow),
    ],
)
def test_unmounted_store_takes_no_checkpoint(
    arena: Arena, spec: JobSpec, gone: str, mode: str, engine: type[Any]
) -> None:
    """With the store unmounted its mount point stays empty and nothing is committed or retired. Then the run resumes exactly."""
    if gone == "both":  # are one place
        where = {"store": str(arena.home / "far"), "local": str(arena.home / "far")}
    else:
        where = {"store": str(arena.home / "far"), "local": str(arena.home / "near")}
    changes = {**where, "mode": mode, "keep_last": 1}
    arena.monkeypatch.setattr(store, "DEADLINE_S", 0.0)
    spec = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update=changes)})
    point, mounted = arena.home / ("near" if gone == "near" else "far"), arena.home / "mounted"

    def train(*, unmounted_at: int = 0) -> None:
        with arena.training_run(spec) as run:
            run.restore(engine(model=torch.nn.Linear(4, 1)))
            for batch in run.batches():
                if batch.step == unmounted_at:
                    wait_until(lambda: arena.head("r1") is not None, what="the first commit")
                    point.rename(mounted)
                    point.mkdir()
                run.step_done(0.0)

    with pytest.raises(StoreUnavailable, match=f"mount.*{point}|{point}.*mount"):
        train(unmounted_at=8)
    assert list(point.iterdir()) == []
    assert [row.step for row in arena.lineage("r1")] == [5]
    assert arena.rows("r1", RetireRow) == []
    point.rmdir()
    mounted.rename(point)
    train()
    assert [row.step for row in arena.lineage("r1")] == [5, 10, 15]
    assert arena.rows("r1", QuarantinedCheckpointRow) == []
    assert audit_run(arena.lakehouse, "r1").exact
