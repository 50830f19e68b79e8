"""Which attempt a claim replaces, and for which leg, where it is tried again or a look at the store was a stale one."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch

from dlac_pipeline import TorchState, training_run
from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.checkpoint.store import MANIFEST, folder_of
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, Fenced, ResumeMismatch, SteppedAside
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from dlac_pipeline.supervise.supervisor import Supervisor

if TYPE_CHECKING:
    from pathlib import Path

    from dlac_pipeline.checkpoint.stage.copies import Write
    from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
    from tests.conftest import Arena


@pytest.mark.parametrize("landed", [False, True])
def test_repeated_claim_fences_no_newer_one(arena: Arena, landed: bool) -> None:
    """A recovery that names no attempt waits for an unavailable catalog, before its claim and after it."""
    arena.table(appends=(64,))
    spec = arena.spec("r", world_size=1, passes=1)
    start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    tries = iter(("away", "back"))

    def away(*given: Any, **how: Any) -> ResumePoint:
        if next(tries) == "back":
            return start_attempt(*given, **how)
        if landed:
            start_attempt(*given, **how)
        start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(nonce="another"))
        raise CatalogUnreachable("away for a moment")

    arena.monkeypatch.setattr("dlac_pipeline.supervise.start.supervised_start.start_attempt", away)
    with pytest.raises(SteppedAside):
        Supervisor(Request(spec=spec, noticed_by="recovery_sensor")).run()
    assert arena.rows("r", ClaimRow)[-1].nonce == "another"


def test_leg_is_checked_after_claim(arena: Arena) -> None:
    """If the manifest is back when it is restored, a rewind leaves its rows out, and another spec is refused."""
    arena.table(appends=(200,))
    spec = arena.spec("r", world_size=1, passes=1, every_steps=2)
    arena.train(spec, until=5)
    rewind_run(arena.lakehouse, "r", nonce="op", step=2, exclude=["row_id >= 150"])
    manifest = folder_of(arena.lineage("r")[-1].manifest_uri) / MANIFEST
    whole = manifest.read_bytes()

    def mended(*given: Any, **how: Any) -> Any:
        manifest.write_bytes(whole)
        return claim(*given, **how)

    def taken(spec: Any) -> ResumePoint:
        manifest.write_bytes(whole[:-1])
        return start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())

    arena.monkeypatch.setattr("dlac_pipeline.supervise.start.claim.claim", mended)
    point = taken(spec)
    assert (point.step, point.quarantined, point.leg_is_new) == (2, [], True)
    assert json.loads(point.leg)["sources"][0]["exclude"] == ["row_id >= 150"]
    with pytest.raises(ResumeMismatch):
        taken(arena.spec("r", world_size=1, passes=1, every_steps=2, batch_size=16))


def test_claim_of_memory_reads_no_store(arena: Arena) -> None:
    """The first try of a claim names a state in memory. At the next one the head looks damaged: no checkpoint is read instead."""
    arena.table(appends=(200,))
    spec = arena.spec("r", world_size=1, passes=1, every_steps=2)
    arena.train(spec, until=5)
    named = {"memory_of": 1, "memory_step": 5, "memory_ranks": 1, "memory_at": 5.0}
    claim(Ledger(arena.lakehouse), "r", nonce="n", replaces=1, facts=named)
    manifest = folder_of(arena.lineage("r")[-1].manifest_uri) / MANIFEST
    manifest.write_bytes(manifest.read_bytes()[:-1])
    request = ClaimRequest(nonce="n", replaces=1, from_memory=True)
    point = start_attempt(Plans(arena.lakehouse), spec, request)
    assert isinstance(point, FromMemory)
    assert (point.attempt, point.memory_of, point.step, point.folder) == (2, 1, 5, "")


class _Swept(TorchState):
    """A state whose staging folder is removed while it is saved, as the sweep of the next launch does."""

    lakehouse: Lakehouse

    def save(self, folder: Path, write: Write) -> None:
        """Claim the run for another launch, remove the folder, then save into it."""
        claim(Ledger(self.lakehouse), "r", nonce="next", replaces=1)
        shutil.rmtree(folder)
        super().save(folder, write)


def test_swept_staging_is_fenced_off(arena: Arena) -> None:
    """A superseded launch whose staging folder was removed dies of `Fenced`, and not of a store that is full."""
    arena.table(appends=(200,))
    spec = arena.spec("r", world_size=1, passes=1, every_steps=2)
    path = arena.home / "r.yaml"
    path.write_text(spec.model_dump_json())
    arena.monkeypatch.setenv("DLAC_HOME", str(arena.home))
    state = _Swept(model=torch.nn.Linear(4, 1))
    state.lakehouse = arena.lakehouse
    with pytest.raises(Fenced, match="owned by attempt 2"):
        _train(path, state)


def _train(path: Path, state: TorchState) -> None:
    with training_run(path) as run:
        run.restore(state)
        for _ in run.batches():
            run.step_done(0.0)
