"""Weights for deployment: what a checkpoint's model has, in one file, and from the file back to what it has seen."""

import os
import shutil
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import dlac_pipeline
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.audit.lakehouse_sql import open_audit
from dlac_pipeline.checkpoint.engines.torch_state import TorchState
from dlac_pipeline.checkpoint.stage.copies import Direct
from dlac_pipeline.checkpoint.store import folder_of, tiers_of
from dlac_pipeline.extensions.exchange import export
from dlac_pipeline.extensions.exchange.export import export_weights
from dlac_pipeline.extensions.exchange.exported_files import checkpoint_of_file
from dlac_pipeline.extensions.exchange.weights import weights_of
from dlac_pipeline.extensions.kept_checkpoints.tags import name_checkpoint
from dlac_pipeline.extensions.sharded.distributed_state import DistributedState
from dlac_pipeline.lakehouse.errors import CheckpointDamaged, CheckpointError, NoSuchCheckpoint, StoreUnavailable
from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.lakehouse.ledger.commits import names_of
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ExportRow, NameRow
from tests.conftest import Arena, wait_until


@pytest.mark.slow
def test_the_file_has_the_weights_and_leads_back(arena: Arena) -> None:
    """Weights equal the checkpoint bit for bit. A renamed copy is known by its digest, which is recorded once."""
    arena.table(appends=(640,))
    spec = arena.trained("r", world_size=1, passes=1, until=15)
    first = export_weights(arena.lakehouse, tiers_of(spec), arena.home / "early.safetensors", step=10)
    arena.train(spec)
    last = export_weights(arena.lakehouse, tiers_of(spec), arena.home / "out" / "model.safetensors")
    rows = {row.step: row for row in arena.lineage("r")}
    assert (first.step, last.step) == (10, 20)
    saved = torch.load(folder_of(rows[10].manifest_uri) / "torch-state.pt", weights_only=True)["model"]
    found = load_file(first.path)
    assert found.keys() == saved.keys()
    assert all(torch.equal(found[name], saved[name]) for name in saved)
    with safe_open(last.path, "pt") as opened:
        assert opened.metadata()["dlac.model_digest"] == rows[20].model_digest
    deployed = arena.home / "deployed.bin"
    shutil.copy(last.path, deployed)
    assert checkpoint_of_file(arena.lakehouse, deployed)["checkpoint_id"] == rows[20].checkpoint_id
    with open_audit(arena.lakehouse) as connection:
        seen = connection.execute(
            "SELECT step, file_digest FROM exports JOIN checkpoints USING (run, checkpoint_id, step) ORDER BY step"
        ).fetchall()
    assert seen == [(10, first.digest), (20, last.digest)]
    again = export_weights(arena.lakehouse, tiers_of(spec), arena.home / "again", step=10)
    assert (again.digest, len(arena.rows("r", ExportRow))) == (first.digest, 2)
    assert audit_run(arena.lakehouse, "r").exact
    with deployed.open("ab") as stream:
        stream.write(b"x")
    with pytest.raises(NoSuchCheckpoint, match=r"deployed.bin.*found none with its digest"):
        checkpoint_of_file(arena.lakehouse, deployed)


def test_what_cannot_be_exported_is_refused(arena: Arena) -> None:
    """Another part, a step without a checkpoint, and damaged files. Nothing is written or held, also after a killed export."""
    arena.table(appends=(640,))
    tiers, out = tiers_of(arena.trained("r", world_size=1, passes=1, until=15)), arena.home / "weights"
    # as a killed export leaves it
    name_checkpoint(Ledger(arena.lakehouse), "r", f"export:{socket.gethostname()}:{out}")
    with pytest.raises(CheckpointError, match=r"named 'student' in the checkpoint, found \['model'\]"):
        export_weights(arena.lakehouse, tiers, out, part="student")
    with pytest.raises(NoSuchCheckpoint, match=r"at step 20 that is kept, found those of steps \[10\]"):
        export_weights(arena.lakehouse, tiers, out, step=20)
    (row,) = arena.lineage("r")
    (folder_of(row.manifest_uri) / "torch-state.pt").unlink()
    with pytest.raises(CheckpointDamaged):
        export_weights(arena.lakehouse, tiers, out)
    assert not list(arena.home.glob("weights*"))
    assert arena.rows("r", ExportRow) == []
    assert names_of(arena.rows("r", NameRow)) == {}


def test_export_survives_concurrent_retention(arena: Arena) -> None:
    """The run's retention waits for the export, and continues afterwards."""
    arena.table(appends=(1000,))
    spec = arena.spec("r", world_size=1, passes=1, keep_last=1)
    asked, answers = threading.Event(), threading.Event()

    def read_slowly(*args: Any, **options: Any) -> Any:
        asked.set()
        assert answers.wait(60)
        return weights_of(*args, **options)

    arena.monkeypatch.setattr(export, "weights_of", read_slowly)
    with ThreadPoolExecutor(1) as pool, arena.training_run(spec) as run:
        run.restore(dlac_pipeline.TorchState(model=torch.nn.Linear(4, 1)))
        for batch in run.batches():
            if batch.step == 15:
                out = arena.home / "weights.safetensors"
                made = pool.submit(export_weights, connect(arena.lakehouse.config), tiers_of(spec), out)
                assert asked.wait(60)
            run.step_done(0.0)
            if batch.step == 25:
                held = arena.lineage("r")[0]
                answers.set()
                assert made.result().checkpoint_id == held.checkpoint_id
    assert names_of(arena.rows("r", NameRow)) == {}
    wait_until(lambda: not folder_of(held.manifest_uri).exists(), what="the removal of what was exported")
    assert audit_run(arena.lakehouse, "r").exact


def test_a_full_disk_is_named(arena: Arena, small_disk: Path) -> None:
    """The store's error, not the library's; nothing is left there, in the ledger, or held."""
    arena.table(appends=(640,))
    spec = arena.trained("r", world_size=1, passes=1, until=15)
    filler = small_disk / "filler"
    with filler.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, shutil.disk_usage(small_disk).free)
    with pytest.raises(
        StoreUnavailable, match=r"write to the file of weights at '.*disk/weights'.*No space left on device"
    ):
        export_weights(arena.lakehouse, tiers_of(spec), small_disk / "weights")
    assert list(small_disk.iterdir()) == [filler]
    assert arena.rows("r", ExportRow) == []
    assert names_of(arena.rows("r", NameRow)) == {}


class Held(torch.nn.Module):
    """A model whose own attribute is called `module`."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


WRAPPINGS: dict[str, Callable[[Any], Any]] = {
    "ddp": DistributedDataParallel,
    "ddp of compiled": lambda model: DistributedDataParallel(torch.compile(model)),
    "checkpointed": checkpoint_wrapper,
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("engine", ["torch", "dcp"])
@pytest.mark.parametrize("wrapping", WRAPPINGS)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")
def test_weights_load_into_the_bare_model(tmp_path: Path, wrapping: str, engine: str) -> None:
    """Wrappers of training are removed. An attribute named `module` stays, and checkpoints load as they did."""
    bare = Held()
    wrapped = WRAPPINGS[wrapping](bare)
    state: Any = TorchState(model=wrapped) if engine == "torch" else DistributedState(model=wrapped)
    state.save(tmp_path, Direct().write)
    found = weights_of(engine, tmp_path)
    again = Held()
    again.load_state_dict(found)
    assert all(torch.equal(value, bare.state_dict()[name]) for name, value in again.state_dict().items())
    with torch.no_grad():
        next(bare.parameters()).zero_()
    state.load(tmp_path, saved_world_size=1)
    assert torch.equal(next(bare.parameters()), next(again.parameters()))
