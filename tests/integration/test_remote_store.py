"""Checkpoints in an object store: committed, fetched, retired and removed there, and a network that fails."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch

import dlac_pipeline as dlac
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint import store as checkpoint_store
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints, verify_checkpoints
from dlac_pipeline.lakehouse.errors import StoreUnavailable
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, wait_until
from tests.integration.test_cli import dlac as dlac_command
from tests.object_store import Network, ObjectStore


def remote(
    arena: Arena,
    store: ObjectStore,
    url: str | None = None,
    *,
    address: str = "s3://lake/checkpoints/",
    **changes: Any,
) -> JobSpec:
    """Return a run of 15 steps with a checkpoint every 5 in the bucket, and its tables in a local folder."""
    arena.table(appends=(70, 50), row_group_rows=20)
    places = {"store": address, "store_properties": store.properties(url)}
    settings: dict[str, Any] = {"world_size": 1, "batch_size": 16, "key_groups": 4, "every_steps": 5}
    return arena.spec("r1", **{**settings, **places, **changes})


def objects(store: ObjectStore) -> set[str]:
    """Steps and names of the objects of the run's checkpoints."""
    selector = pafs.FileSelector("lake/checkpoints/r1", recursive=True, allow_not_found=True)
    found = [info for info in store.files.get_file_info(selector) if info.is_file and "attempt-" in info.path]
    return {f"{int(info.path.split('/')[-2].split('-')[1])}/{info.base_name}" for info in found}


def test_run_resumes_from_store_alone(arena: Arena, store: ObjectStore) -> None:
    """Killed, and its machine lost: files come from the bucket, digests hold, and the audit finds every row once."""
    spec = remote(arena, store)
    arena.train(spec, until=8)
    names = {"manifest.json", "torch-state.pt", "rng-00000.pt"}
    assert objects(store) == {f"5/{name}" for name in names}
    shutil.rmtree(spec.checkpoint.local)
    assert min(arena.train(spec)) == 6
    assert audit_run(arena.lakehouse, "r1").exact
    listed = list_checkpoints(arena.lakehouse, "r1")
    assert [each.tiers for each in listed] == [["store"], ["local", "store"], ["local", "store"]]
    verdicts = list(verify_checkpoints(arena.lakehouse, "r1", files=tiers_of(spec).files))
    assert [(verdict.checkpoint.step, verdict.problem) for verdict in verdicts] == [(15, None), (10, None), (5, None)]


def test_damage_in_the_bucket_is_found(arena: Arena, store: ObjectStore) -> None:
    """An object that was altered, and one that is gone, are named with their addresses, on the command line too."""
    spec = remote(arena, store)
    arena.train(spec, until=13)
    selector = pafs.FileSelector("lake/checkpoints/r1", recursive=True)
    paths = [info.path for info in store.files.get_file_info(selector) if info.base_name == "torch-state.pt"]
    first, second = sorted(paths)
    with store.files.open_output_stream(first) as stream:
        stream.write(b"something else")
    store.files.delete_file(second)
    path = arena.home / "r1.yaml"
    done = dlac_command("checkpoint", "verify", "r1", "--spec", str(path), home=arena.home)
    assert done.returncode == 1
    assert f"bytes in 's3://{first}', found 14" in done.stdout
    assert f"'s3://{second}' of a committed checkpoint, found none" in done.stdout


@pytest.mark.soak
def test_retired_checkpoints_leave_bucket(arena: Arena, store: ObjectStore) -> None:
    """Objects of retired checkpoints go, and what an attempt that was replaced had copied and never committed."""
    spec = remote(arena, store, keep_last=1)
    arena.train(spec, until=8)
    nonce = arena.rows("r1", ClaimRow)[0].nonce
    with store.files.open_output_stream(f"lake/checkpoints/r1/attempt-0001/step-000000099-{nonce}/rng.pt") as stream:
        stream.write(b"staged, never committed")
    arena.train(spec)
    wait_until(lambda: {name.split("/")[0] for name in objects(store)} == {"15"}, what="the removal")
    assert audit_run(arena.lakehouse, "r1").exact


def train(arena: Arena, spec: JobSpec, at: dict[int, Any]) -> None:
    """Train in this process; `at` some steps something happens."""
    with arena.training_run(spec) as run:
        run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            if batch.step in at:
                at[batch.step]()
            run.step_done(0.0)


@pytest.mark.parametrize("mode", [pytest.param("synchronous", marks=pytest.mark.soak), "asynchronous"])
def test_a_network_that_is_cut_is_waited_for(arena: Arena, store: ObjectStore, network: Network, mode: str) -> None:
    """Cut in the middle of a run and mended after a while: the checkpoint that was due is committed then."""
    spec = remote(arena, store, network.url, mode=mode)

    def cut() -> None:
        network.cut()
        threading.Timer(1.5, network.mend).start()

    train(arena, spec, at={9: cut})
    assert [row.step for row in arena.lineage("r1")] == [5, 10, 15]
    assert audit_run(arena.lakehouse, "r1").exact
    assert Ledger(arena.lakehouse).state("r1").fence.attempt == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synchronous", pytest.param("asynchronous", marks=pytest.mark.soak)])
def test_dead_store_ends_run_at_checkpoint(arena: Arena, store: ObjectStore, network: Network, mode: str) -> None:
    """After the deadline the run ends with a status that names the address. With the store back it resumes exactly."""
    spec = remote(arena, store, network.url, mode=mode)
    arena.monkeypatch.setattr(checkpoint_store, "DEADLINE_S", 2.0)

    def cut() -> None:
        wait_until(lambda: arena.head("r1") is not None, what="the first commit")
        network.cut()

    with pytest.raises(
        StoreUnavailable, match="write to the checkpoint store at 's3://lake/checkpoints/r1/attempt-0001"
    ):
        train(arena, spec, at={9: cut})
    assert [row.step for row in arena.lineage("r1")] == [5]
    with pytest.raises(StoreUnavailable, match="s3://lake/checkpoints/r1/"):
        train(arena, spec, at={})
    network.mend()
    train(arena, spec, at={})
    assert [row.step for row in arena.lineage("r1")] == [5, 10, 15]
    assert audit_run(arena.lakehouse, "r1").exact
    assert arena.rows("r1", CheckpointRow)[-1].phases["upload"] > 0


def test_missing_bucket_is_named_at_once(arena: Arena, store: ObjectStore) -> None:
    """A wrong address is not waited for, and nothing is claimed."""
    spec = remote(arena, store, address="s3://elsewhere/checkpoints")
    with pytest.raises(StoreUnavailable, match="s3://elsewhere/checkpoints/r1"):
        arena.train(spec)
    assert arena.rows("r1") == []


@pytest.mark.soak
def test_verify_finds_store_of_run(arena: Arena, store: ObjectStore) -> None:
    """Endpoint and credentials stand in the spec that the run was launched with, not in the lakehouse."""
    spec = remote(arena, store)
    assert arena.launch(spec).wait() == 0
    done = dlac_command("checkpoint", "verify", "r1", home=arena.home)
    assert (done.returncode, done.stdout.splitlines()[0]) == (0, "step 15: whole"), done.stdout
