"""Checkpoints and tables in an object store and in a REST catalog: whole runs, and a network or server that fails."""

import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch

import dlac_pipeline as dlac
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint import store as checkpoint_store
from dlac_pipeline.checkpoint.store import tiers_of
from dlac_pipeline.extensions.kept_checkpoints.listing import list_checkpoints, verify_checkpoints
from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint
from dlac_pipeline.extensions.upkeep.upkeep import run_upkeep
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Append, Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, NameRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, wait_until
from tests.fixtures import Command
from tests.object_store import Network, ObjectStore
from tests.seaweedfs import SeaweedFS, needs_seaweedfs


def remote(
    arena: Arena, store: ObjectStore, url: str | None = None, *, address: str = "s3://lake/checkpoints/", **changes: Any
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


@pytest.mark.slow
def test_damage_in_the_bucket_is_found(arena: Arena, store: ObjectStore, here: Command) -> None:
    """An object that was altered, and one that is gone, are named with their addresses, on the command line too."""
    arena.train(remote(arena, store), until=13)
    selector = pafs.FileSelector("lake/checkpoints/r1", recursive=True)
    paths = [info.path for info in store.files.get_file_info(selector) if info.base_name == "torch-state.pt"]
    first, second = sorted(paths)
    with store.files.open_output_stream(first) as stream:
        stream.write(b"something else")
    store.files.delete_file(second)
    done = here("checkpoint", "verify", "r1", "--spec", str(arena.home / "r1.yaml"), home=arena.home)
    assert done.returncode == 1
    assert f"bytes in 's3://{first}', found 14" in done.stdout
    assert f"'s3://{second}' of a committed checkpoint, found none" in done.stdout


def train(arena: Arena, spec: JobSpec, at: dict[int, Any]) -> None:
    """Train in this process; `at` some steps something happens."""
    with arena.training_run(spec) as run:
        run.restore(dlac.TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            if batch.step in at:
                at[batch.step]()
            run.step_done(0.0)


@pytest.mark.slow
def test_cut_network_is_waited_for(arena: Arena, store: ObjectStore, network: Network) -> None:
    """A network is cut in the middle of a run and mended after a while. The checkpoint that was due is committed then."""
    spec = remote(arena, store, network.url, mode="asynchronous")

    def cut() -> None:
        network.cut()
        threading.Timer(1.5, network.mend).start()

    train(arena, spec, at={9: cut})
    assert [row.step for row in arena.lineage("r1")] == [5, 10, 15]
    assert audit_run(arena.lakehouse, "r1").exact
    assert Ledger(arena.lakehouse).state("r1").fence.attempt == 1


@pytest.mark.slow
def test_dead_store_ends_run_at_checkpoint(arena: Arena, store: ObjectStore, network: Network) -> None:
    """After the deadline the run ends with a status that names the address. With the store back it resumes exactly."""
    spec = remote(arena, store, network.url, mode="synchronous")
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


def test_warehouse_outage_is_awaited(store: ObjectStore, network: Network, tmp_path: Path) -> None:
    """A look at the ledger reports the outage. An append is repeated until the store is back, and lands once."""
    lakehouse = connect(
        LakehouseConfig(warehouse="s3://lake/warehouse", properties=store.properties(network.url)).at_home(tmp_path)
    )
    ledger = Ledger(lakehouse)
    claim(ledger, "r", nonce="n", replaces=0)
    network.cut()
    with pytest.raises(CatalogUnreachable, match="warehouse"):
        ledger.rows("r")
    mends = threading.Timer(0.5, network.mend)
    mends.start()
    name_row = NameRow(name="kept")
    ledger.append("r", lambda state: Append(rows=[name_row], fence=replace(state.fence, seq=2)))
    mends.join()
    assert [row.kind for row in ledger.rows("r")] == ["claim", "name"]


@pytest.fixture
def served(server: SeaweedFS, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Arena]:
    """A lakehouse in the catalog, without files on this node."""
    (tmp_path / "home").mkdir()
    made = Arena(tmp_path / "home", monkeypatch, server.lakehouse("dlac"))
    yield made
    made.close()
    for name in made.lakehouse.catalog.list_tables("src") + made.lakehouse.catalog.list_tables("dlac"):
        made.lakehouse.catalog.drop_table(name)


@pytest.mark.slow
@needs_seaweedfs
def test_run_resumes_on_rest_catalog(served: Arena, server: SeaweedFS) -> None:
    """Each step runs on the servers alone: plan, pin, training, resume without local files, audit and upkeep."""
    served.table()
    spec = served.spec(
        "rested", world_size=1, passes=1, store="s3://store/checkpoints", store_properties=server.properties
    )
    before = served.train(spec, until=25)
    shutil.rmtree(spec.checkpoint.local)
    after = served.train(spec)
    repeated = before.keys() & after.keys()
    assert repeated == {21, 22, 23, 24}
    assert all(before[step] == after[step] for step in repeated)
    assert audit_run(served.lakehouse, "rested").exact
    assert {each.table: each for each in run_upkeep(served.lakehouse, keep=1)}["consumption"].expired_snapshots > 0
    assert audit_run(served.lakehouse, "rested").exact


@pytest.mark.slow
@needs_seaweedfs
def test_rest_outage_is_awaited(served: Arena, server: SeaweedFS) -> None:
    """The server is killed and started again. An append is repeated until it answers."""
    served.table()
    served.train(served.spec("waits", world_size=1, passes=1), until=15)
    ledger = Ledger(served.lakehouse)
    server.kill()
    restart = threading.Timer(2.0, server.start)
    restart.start()
    name_checkpoint(ledger, "waits", "kept")
    restart.join()
    assert [row.kind for row in ledger.rows("waits")][-1] == "name"
