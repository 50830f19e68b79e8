"""Promises of the door `dlac.launchers`, by the core's launcher, Slurm, Kubernetes, and a launcher of another distribution."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.lakehouse.errors import SpecInvalid
from dlac_pipeline.launchers.protocol import Here, Launcher, launcher_for, render_job
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.spec.launch_spec import HERE, LAUNCHERS
from tests.conftest import Arena
from tests.extensions.clusters.cluster import GOOD
from tests.extensions.clusters.kubernetes_api import kubernetes_api
from tests.extensions.clusters.slurm_cluster import needs_slurm, slurm_cluster
from tests.installed import install_launcher

SECRET = "hunter2-of-the-test"
NAMES = (HERE, "slurm", "kubernetes", "marked")
Events = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install the launcher of another distribution."""
    monkeypatch.syspath_prepend(str(install_launcher(tmp_path / "installed")))


@pytest.fixture(
    params=[
        HERE,
        "marked",
        pytest.param("kubernetes", marks=pytest.mark.slow),
        pytest.param("slurm", marks=[pytest.mark.slow, needs_slurm]),
    ]
)
def scheduled(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a launcher, whose scheduler runs."""
    monkeypatch.chdir(tmp_path)
    schedulers: dict[str, AbstractContextManager[Any]] = {}
    if request.param == "kubernetes":
        schedulers["kubernetes"] = kubernetes_api(tmp_path, monkeypatch)
    elif request.param == "slurm":
        schedulers["slurm"] = slurm_cluster(tmp_path / "slurm", monkeypatch)
    with schedulers.get(request.param, nullcontext()):
        yield request.param


def cluster_for(name: str) -> dict[str, Any]:
    """Return the settings without which a scheduler refuses a job."""
    return {"cluster": {"image": "i"}} if name == "kubernetes" else {}


def launcher_of(arena: Arena, name: str, events: Events) -> Launcher:
    """Return a launcher of a run with one rank. The nodes of a job are on this host, so an embedded lakehouse serves them."""
    spec = arena.spec("r1", on=name, world_size=1, passes=1, pause_s=0.01)
    cluster = {**cluster_for(name).get("cluster", {}), "python": sys.executable}
    more = {"cluster": cluster} if name in ("slurm", "kubernetes") else {}
    request = Request(spec=parse_spec(spec.model_dump() | more, origin="the test"))
    if name == HERE:
        return Here(request, on_event=events.append)
    launcher: Launcher = LAUNCHERS.load(name, setting="launch.on")(request, events.append)
    return launcher


@pytest.mark.parametrize("name", NAMES)
def test_check_starts_nothing(name: str) -> None:
    """A launcher that is made and checked has reported nothing, and asked no scheduler."""
    events: Events = []
    launch = {**GOOD["launch"], "on": name, "rendezvous": "h:1"}
    spec = parse_spec({**GOOD, "launch": launch, **cluster_for(name)}, origin="the test")
    launcher_for(Request(spec=spec), events.append).check()
    assert events == []


@pytest.mark.parametrize("name", NAMES)
def test_rendered_job_has_no_secret(name: str) -> None:
    """A job is shown with *** for secrets. The launcher without one refuses, and names the launchers that have one."""
    launch = {**GOOD["launch"], "on": name, "rendezvous": "h:1", "env": {"HF_TOKEN": SECRET}}
    request = Request(spec=parse_spec({**GOOD, "launch": launch, **cluster_for(name)}, origin="the test"))
    if name == HERE:
        with pytest.raises(SpecInvalid, match="'kubernetes' or 'marked' or 'slurm' to render a job for, found 'here'"):
            render_job(request)
        return
    shown = render_job(request)
    assert GOOD["run"].lower().replace("_", "-")[:8] in shown.lower().replace("_", "-")
    assert SECRET not in shown


def test_run_ends_finished(scheduled: str, arena: Arena) -> None:
    """The run is trained to its end, and its checkpoints are reported."""
    arena.table(appends=(320,))
    events: Events = []
    outcome = launcher_of(arena, scheduled, events).run()
    assert (outcome.ending, outcome.step) == ("finished", 10)
    reported = [event["checkpoint_id"] for event in events if event["event"] == "checkpoint"]
    assert reported == [row.checkpoint_id for row in arena.lineage("r1")]
    assert {event.get("by") for event in events} == {"marked" if scheduled == "marked" else None}


@pytest.mark.parametrize("name", [HERE, pytest.param("marked", marks=pytest.mark.slow)])
def test_stop_commits_and_ends(name: str, arena: Arena) -> None:
    """A stop request during training ends the run after a checkpoint, and the next launch finishes it."""
    arena.table()
    events: Events = []

    class Stopping(Events):
        def append(self, event: dict[str, Any]) -> None:
            super().append(event)
            if event["event"] == "checkpoint":
                launcher.stop()

    launcher = launcher_of(arena, name, Stopping())
    assert launcher.run().ending == "stopped"
    stopped_at = arena.lineage("r1")[-1].step
    assert 10 <= stopped_at < 63
    assert launcher_of(arena, name, events).run().step == 63
