"""A frozen base is stored once per attempt: later checkpoints have its file by a link, or refer to it in the store."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dlac_pipeline import DistributedState, TorchState
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.manifest import Manifest, read_manifest
from dlac_pipeline.checkpoint.restore.verified_copy import restore
from dlac_pipeline.checkpoint.store import folder_of, tiers_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, wait_until

Change = Callable[[int, nn.Module], None]
FILES = {TorchState: "torch-frozen.pt", DistributedState: "shard-00001-frozen-00001-of-00001.safetensors"}
ENGINES = pytest.mark.parametrize("engine", [TorchState, DistributedState])


class Adapted(nn.Module):
    """A frozen base of 1.4 MB and an adapter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.base = nn.Linear(600, 600).requires_grad_(False)
        self.adapter = nn.Linear(600, 1)


def train(
    arena: Arena, spec: JobSpec, engine: type[Any], *, until: int = 0, change: Change = lambda step, model: None
) -> dict[str, torch.Tensor]:
    """Train the adapter. The process "dies" in step `until`. Return the weights after the last step."""
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


@pytest.fixture(params=["one place", "two places"])
def spec(arena: Arena, request: pytest.FixtureRequest) -> JobSpec:
    """A run of 15 steps with a checkpoint every 3."""
    arena.table(appends=(70, 50), row_group_rows=20)
    places = {"local": str(arena.home / "near"), "store": str(arena.home / "near")}
    if request.param == "two places":
        places["store"] = str(arena.home / "far")
    return arena.spec("r1", world_size=1, batch_size=16, key_groups=4, every_steps=3, **places)


def manifests(arena: Arena, spec: JobSpec) -> dict[int, Manifest]:
    """Return the manifests that the store has, by step."""
    rows = arena.rows("r1", CheckpointRow)
    files = tiers_of(spec).files
    return {row.step: read_manifest(row.manifest_uri, row.manifest_digest, files) for row in rows}


def stored_bytes(folder: Path) -> int:
    """Return the bytes that a folder takes. Names of one file count once."""
    found = {each.stat().st_ino: each.stat().st_size for each in folder.rglob("*") if each.is_file()}
    return sum(found.values())


@ENGINES
def test_base_is_stored_once(arena: Arena, spec: JobSpec, engine: type[Any]) -> None:
    """Five checkpoints take one base in each place. The next attempt resumes from the last one, equal in every bit."""
    weights = train(arena, spec, engine, until=13)
    base = weights["base.weight"].nbytes
    for place in {spec.checkpoint.local, spec.checkpoint.store}:
        assert base < stored_bytes(Path(place)) < 1.3 * base
    resumed = train(arena, spec, engine)
    alone = train(arena, spec.model_copy(update={"run": "r2"}), engine)
    assert all(torch.equal(each, resumed[name]) for name, each in alone.items())
    assert audit_run(arena.lakehouse, "r1").exact
