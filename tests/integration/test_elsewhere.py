"""A launch is refused for a launch on another node, which is known by signs of life only."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from dlac_pipeline.lakehouse.errors import RunBusy
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import HEAD_KINDS, CheckpointRow, ClaimRow, FinishRow, LedgerRow
from dlac_pipeline.plan.plan import Plans
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.liveness.launch_liveness import refuse_if_alive_elsewhere
from dlac_pipeline.supervise.liveness.run_lock import run_lock
from dlac_pipeline.supervise.start.request import ClaimRequest
from dlac_pipeline.supervise.start.start_attempt import start_attempt
from dlac_pipeline.supervise.supervisor import Supervisor
from tests.conftest import Arena


@pytest.fixture
def spec(arena: Arena) -> JobSpec:
    """A run of four steps; a launch elsewhere is not lost within a test, on however busy a machine."""
    lost_after(arena, 3600.0)
    arena.table(appends=(64,), row_group_rows=32)
    return arena.spec("r", world_size=1, passes=1, batch_size=16, every_steps=2)


@contextmanager
def machine(arena: Arena, name: str = "node7") -> Iterator[None]:
    """Act under this node name."""
    with arena.monkeypatch.context() as patched:
        patched.setattr(socket, "gethostname", lambda: name)
        yield


def meeting(spec: JobSpec, **launch: Any) -> JobSpec:
    """The spec with other settings of its launch."""
    return spec.model_copy(update={"launch": LaunchSpec.model_validate({**spec.launch.model_dump(), **launch})})


def lost_after(arena: Arena, seconds: float) -> None:
    """A launch elsewhere is lost when it has been silent for so long."""
    arena.monkeypatch.setattr("dlac_pipeline.supervise.liveness.launch_liveness.LOST_AFTER_S", seconds)


def set_clock(arena: Arena, ahead_s: float) -> None:
    """Let the clock of this node be wrong."""
    clock = SimpleNamespace(time=lambda: time.time() + ahead_s, monotonic=time.monotonic)
    arena.monkeypatch.setattr("dlac_pipeline.supervise.liveness.launch_liveness.time", clock)


def look(arena: Arena, spec: JobSpec, *, launched_by: str = "", wait_s: float = 0.0, told: bool = False) -> None:
    """What a launch of the spec does before it claims."""
    stop = threading.Event()
    if told:
        stop.set()

    def rows() -> list[LedgerRow]:
        return Ledger(arena.lakehouse).rows(spec.run, kinds=HEAD_KINDS)

    refuse_if_alive_elsewhere(rows, spec, launched_by=launched_by, wait_s=wait_s, stop=stop)


@pytest.mark.slow
def test_live_launch_elsewhere_is_not_fenced(arena: Arena, spec: JobSpec) -> None:
    """The refusal names what was found and how long to wait; nothing is claimed."""
    with machine(arena):
        start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    with pytest.raises(RunBusy, match=r"attempt 1 on node 'node7'.* \d+ s ago: wait 3[56]\d\d s.*--takeover"):
        Supervisor(Request(spec=spec)).run()
    assert [row.attempt for row in arena.rows("r", ClaimRow)] == [1]
    assert not list((arena.home / "checkpoints" / "r").glob("launch*"))


@pytest.mark.soak
@pytest.mark.parametrize("how", ["lost", "replaced", "taken over"])
def test_lost_launch_delays_nobody_else(arena: Arena, spec: JobSpec, how: str) -> None:
    """The machine was lost, a recovery names the attempt that it replaces, or a person takes the run over."""
    with machine(arena):
        start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    if how == "lost":
        lost_after(arena, 0.01)
    asked: dict[str, dict[str, Any]] = {
        "lost": {},
        "replaced": {"replaces": 1, "noticed_by": "recovery_sensor"},
        "taken over": {"takeover": True},
    }
    assert Supervisor(Request(spec=spec, **asked[how])).run().ending == "finished"
    assert [row.attempt for row in arena.rows("r", ClaimRow)] == [1, 2]


def test_wait_lasts_as_requested(arena: Arena, spec: JobSpec) -> None:
    """A launch waits until the first one is lost, or until the waiting one is stopped."""
    with machine(arena):
        start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    with pytest.raises(RunBusy):
        look(arena, spec, wait_s=600.0, told=True)
    lost_after(arena, 0.5)
    look(arena, spec, wait_s=600.0)


def test_other_local_folder_is_seen_by_lock(arena: Arena, spec: JobSpec) -> None:
    """While it is held; a claim with this very folder is left to the lock."""
    other = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"local": f"{arena.home}/other"})})
    (arena.home / "other" / "r").mkdir(parents=True)
    start_attempt(Plans(arena.lakehouse), other, ClaimRequest())
    with run_lock(other.checkpoint.local, "r", wait_s=0.0, takeover=False):
        with pytest.raises(RunBusy, match=r"attempt 1 on this node, with the local folder '.*other'"):
            look(arena, spec)
        look(arena, other)
    look(arena, spec)


def test_what_goes_on_by_design_is_not_refused(arena: Arena, spec: JobSpec) -> None:
    """Machines that meet at one place, a cluster's job, a run that the orchestrator knows; of others only those by hand."""
    here, there = (meeting(spec, nodes="2", rendezvous=f"{place}:29400") for place in ("here", "there"))
    with machine(arena):
        start_attempt(Plans(arena.lakehouse), here, ClaimRequest())
    look(arena, here)
    look(arena, meeting(spec, on="slurm"))
    for other in (spec, there):
        with pytest.raises(RunBusy):
            look(arena, other, launched_by="recovery")
    with machine(arena):
        start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(launched_by="dead"))
    look(arena, spec, launched_by="recovery")
    with pytest.raises(RunBusy):
        look(arena, spec)


def test_ended_attempt_is_not_alive(arena: Arena, spec: JobSpec) -> None:
    """The last checkpoint or the claim records the end of an attempt. An attempt cut off after a checkpoint has no record."""
    look(arena, spec)
    with machine(arena):
        arena.train(spec, until=3)
    with pytest.raises(RunBusy):
        look(arena, spec)
    with machine(arena):
        start_attempt(Plans(arena.lakehouse), spec, ClaimRequest(purpose={"purpose": "adopts", "origin": "x"}))
    look(arena, spec)
    following = arena.spec("f", world_size=1, follow="appends", passes=1, batch_size=16, every_steps=3)
    with machine(arena):
        arena.train(following)
    assert arena.rows("f", FinishRow) == []
    look(arena, following)


@pytest.mark.soak
def test_clock_ahead_fences_no_healthy_run(arena: Arena, spec: JobSpec) -> None:
    """With this node's clock an hour ahead, steps of another launch are seen in a shared folder."""
    lost_after(arena, 120.0)
    arena.table("src.long", appends=(4000,))
    healthy = arena.spec("r", table="src.long", every_steps=10_000, pause_s=0.1, passes=5)
    launch = arena.launch(healthy)
    launch.wait_for("training")
    set_clock(arena, 3600.0)
    with machine(arena), pytest.raises(RunBusy, match="attempt 1 on node"):
        Supervisor(Request(spec=healthy)).run()
    assert [row.attempt for row in arena.rows("r", ClaimRow)] == [1]
    assert launch.process.poll() is None


@pytest.mark.parametrize("lives", [True, False])
def test_commits_alone_show_life(arena: Arena, spec: JobSpec, lives: bool) -> None:
    """Without visible steps, a commit within twice the longest interval is a sign of life. Without one the launch is lost."""
    lost_after(arena, 120.0)
    arena.monkeypatch.setattr("dlac_pipeline.supervise.liveness.launch_liveness.STEPS_SEEN_S", 0.1)
    arena.monkeypatch.setattr("dlac_pipeline.supervise.liveness.launch_liveness.POLL_S", 0.05)
    with machine(arena):
        arena.train(spec, until=3)
    rows = arena.rows("r", ClaimRow, CheckpointRow)
    rows = [replace(row, committed_at=row.committed_at - timedelta(hours=1)) for row in rows]
    last = rows[-1]
    rows[0] = replace(rows[0], committed_at=last.committed_at - timedelta(seconds=0.5))
    looks: list[int] = []

    def rows_now() -> list[LedgerRow]:
        looks.append(len(rows))
        if lives and len(looks) == 4:
            rows.append(replace(last, seq=last.seq + 1, committed_at=last.committed_at + timedelta(seconds=0.5)))
        return rows

    refused = pytest.raises(RunBusy, match="node7") if lives else nullcontext()
    with refused:
        refuse_if_alive_elsewhere(rows_now, spec, launched_by="", wait_s=0.0, stop=threading.Event())
    assert len(looks) > 3


def test_clock_behind_is_watched_out(arena: Arena, spec: JobSpec) -> None:
    """The signs of a dead launch are an hour ahead: it counts as lost after the usual time of this node's own clock."""
    with machine(arena):
        start_attempt(Plans(arena.lakehouse), spec, ClaimRequest())
    lost_after(arena, 1.0)
    set_clock(arena, -3600.0)
    with pytest.raises(RunBusy, match="wait 1 s"):
        look(arena, spec)
    look(arena, spec, wait_s=600.0)
