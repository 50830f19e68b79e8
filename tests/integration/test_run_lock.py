import fcntl
import json
import os
import shutil
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tenacity import RetryCallState

from dlac_pipeline import TorchState
from dlac_pipeline.checkpoint.restore.resume_point import FromMemory, ResumePoint
from dlac_pipeline.checkpoint.stage.copies import Write
from dlac_pipeline.checkpoint.store import MANIFEST, folder_of
from dlac_pipeline.extensions.branches.rewind import rewind_run
from dlac_pipeline.extensions.replicas.group_locks import name_holder, share_run_lock
from dlac_pipeline.lakehouse import retrying
from dlac_pipeline.lakehouse.durable_io import lock_at_once
from dlac_pipeline.lakehouse.errors import (
    CatalogUnreachable,
    Fenced,
    ResumeMismatch,
    RunBusy,
    SteppedAside,
    StoreUnavailable,
)
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from dlac_pipeline.supervise.supervisor import Outcome, Supervisor
from tests.conftest import Arena


@pytest.fixture
def store(tmp_path: Path) -> str:
    """A store in which two runs have their folders."""
    for run in ("r1", "r2"):
        (tmp_path / run).mkdir()
    return str(tmp_path)


def test_second_launch_waits_for_first(store: str) -> None:
    """The refusal names the process that holds the run; once it left, the run can be launched again."""
    with run_lock(store, "r1", wait_s=0, takeover=False):
        with pytest.raises(RunBusy, match=rf"process {os.getpid()}"), run_lock(store, "r1", wait_s=0.2, takeover=False):
            pass
        with run_lock(store, "r2", wait_s=0, takeover=False):
            pass
    with run_lock(store, "r1", wait_s=0, takeover=False):
        pass


def test_a_takeover_holds_the_run_in_its_turn(store: str) -> None:
    """After a takeover later launches are refused, even after the old holder has exited. A further takeover is not."""
    old = run_lock(store, "r1", wait_s=0, takeover=False)
    old.__enter__()
    with run_lock(store, "r1", wait_s=0, takeover=True):
        old.__exit__(None, None, None)
        with pytest.raises(RunBusy), run_lock(store, "r1", wait_s=0, takeover=False):
            pass
        with run_lock(store, "r1", wait_s=0, takeover=True):
            pass
    with run_lock(store, "r1", wait_s=0, takeover=False):
        pass
    assert [path.name for path in (Path(store) / "r1").iterdir()] == ["launch.lock"]


def test_lock_makes_no_missing_folder(tmp_path: Path) -> None:
    """With the mount gone nothing is built that writers would take for the run's folder. A regular file is no store."""
    with pytest.raises(StoreUnavailable, match="mount it"), run_lock(str(tmp_path), "r1", wait_s=0, takeover=True):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnavailable, match="file"), run_lock(f"{tmp_path}/file", "r1", wait_s=0, takeover=True):
        pass


def test_stopped_launch_takes_no_lock(store: str) -> None:
    """A cancelled recovery must not fence off the launch that it was waiting for."""
    stop = threading.Event()
    with run_lock(store, "r1", wait_s=0, takeover=False):
        threading.Timer(0.2, stop.set).start()
        with pytest.raises(RunBusy), run_lock(store, "r1", wait_s=60, takeover=True, stop=stop):
            pass
        with pytest.raises(RunBusy), run_lock(store, "r1", wait_s=0, takeover=False):
            pass  # it is still the first one's


def test_second_takeover_steps_aside_first(arena: Arena) -> None:
    """`replaces` names an attempt that is not current any more: refused before waiting, claiming or replacing a lock."""
    arena.table(appends=(200,))
    spec = arena.spec("twice", world_size=1)
    start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(replaces=1))
    with pytest.raises(SteppedAside):
        Supervisor(Request(spec=spec, takeover=True, replaces=1)).run()
    assert not list((arena.home / "checkpoints" / "twice").glob("launch*"))


@pytest.mark.parametrize("claimant", [pytest.param("dead", marks=pytest.mark.soak), "another"])
def test_late_claim_of_dead_run_is_replaced(arena: Arena, claimant: str) -> None:
    """A supervisor that was given up while suspended claims late: another recovery replaces its claim, or steps aside."""
    arena.table(appends=(64,))
    spec = arena.spec("late", world_size=1, passes=1)
    start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(launched_by="dead"))
    start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(replaces=1, launched_by=claimant))
    recovery = Supervisor(Request(spec=spec, takeover=True, replaces=1, recovers="dead", launched_by="recovery"))
    if claimant == "dead":
        assert recovery.run().ending == "finished"
        assert [row.attempt for row in arena.rows("late", ClaimRow)] == [1, 2, 3]
    else:
        with pytest.raises(SteppedAside):
            recovery.run()


def test_stopped_claim_without_answer_ends(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog can be read, and takes no commit: nothing was claimed, and nothing has failed."""
    arena.table(appends=(64,))
    database = arena.home / "catalog.db"
    impatient = arena.lakehouse.config.model_copy(update={"uri": f"sqlite:///{database}?timeout=0.1"})
    spec = arena.spec("told", world_size=1, passes=1).model_copy(update={"lakehouse": impatient})
    start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    recovery = Supervisor(Request(spec=spec, takeover=True, replaces=1))
    refused: list[str] = []

    def pausing(state: RetryCallState, *, longest_s: float) -> float:
        assert state.outcome is not None
        refused.append(str(state.outcome.exception()))
        recovery.stop()
        return longest_s

    monkeypatch.setattr(retrying, "pause_s", pausing)
    with closing(sqlite3.connect(database, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert recovery.run() == Outcome(ending="stopped", attempts=1, step=0)
    assert len(refused) == 1
    assert "database is locked" in refused[0]
    assert [row.attempt for row in arena.rows("told", ClaimRow)] == [1]


def test_shared_lock_refuses_launches_until_all_have_left(store: str) -> None:
    """Replica groups share the lock. It always names one that is alive."""
    with run_lock(store, "r1", wait_s=0, takeover=False) as alone:
        assert share_run_lock(store, "r1") is None
        assert lock_at_once(alone, fcntl.LOCK_SH)
        other = share_run_lock(store, "r1")
    assert other is not None
    with pytest.raises(RunBusy), run_lock(store, "r1", wait_s=0, takeover=False):
        pass
    path = Path(store) / "r1" / "launch.lock"
    path.write_text("999999999")  # no process has this number
    name_holder(other)
    assert path.read_text() == str(os.getpid())
    path.write_text("1")
    name_holder(other)
    assert path.read_text() == "1"
    with run_lock(store, "r1", wait_s=0, takeover=True):
        assert share_run_lock(store, "r1") is None  # the path leads to the lock of the takeover
    os.close(other)
    with run_lock(store, "r1", wait_s=0, takeover=False):
        pass


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
    spec = arena.trained("r", world_size=1, passes=1, every_steps=2, until=5)
    rewind_run(arena.lakehouse, "r", nonce="op", target=2, exclude=["row_id >= 150"])
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
    spec = arena.trained("r", world_size=1, passes=1, every_steps=2, until=5)
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
    state = _Swept(model=torch.nn.Linear(4, 1))
    state.lakehouse = arena.lakehouse

    def train() -> None:
        with arena.training_run(spec) as run:
            run.restore(state)
            for _ in run.batches():
                run.step_done(0.0)

    with pytest.raises(Fenced, match="owned by attempt 2"):
        train()
