"""Runs as jobs of a real Slurm on this host: a controller and three nodes, which are lost, preempted and restarted."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlac_pipeline.launchers.cluster_job import ClusterJob
from dlac_pipeline.launchers.slurm import Slurm
from dlac_pipeline.recover.supervise import Outcome
from dlac_pipeline.request import Request
from dlac_pipeline.spec import parse_spec
from tests.conftest import Steps, wait_until
from tests.ports import own_port
from tests.slurm_cluster import SlurmCluster, needs_slurm, slurm_cluster

if TYPE_CHECKING:
    from tests.conftest import Arena

pytestmark = needs_slurm
ROWS = list(range(2000))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    """A Slurm with three idle nodes; jobs are submitted from the test's folder."""
    monkeypatch.chdir(tmp_path)
    with slurm_cluster(tmp_path / "slurm", monkeypatch) as running:
        yield running


class Following:
    """`dlac train` on a thread: a job, its events, and its outcome."""

    def __init__(self, arena: Arena, *, nodes: str, **changes: Any) -> None:
        spec = arena.spec("r1", on="slurm", nodes=nodes, nproc_per_node=1, passes=1, **changes)
        cluster = {"python": sys.executable, "cpu": 2, "port": own_port()}
        request = Request(spec=parse_spec(spec.model_dump() | {"cluster": cluster}, origin="the test"), repin=True)
        self.events: list[dict[str, Any]] = []
        self.job = ClusterJob(request, Slurm(), self.events.append, look_s=0.5, gone_s=5.0)
        self._ended: list[Outcome | Exception] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._ended.append(self.job.run())
        except Exception as err:
            self._ended.append(err)

    @property
    def number(self) -> str:
        """Slurm's number of the job."""
        return str(self.wait_for("submitted")["job"])

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return its events of one kind."""
        return [event for event in self.events if event["event"] == kind]

    def wait_for(self, kind: str, count: int = 1) -> dict[str, Any]:
        """Wait until so many events of a kind have come; return the last of them."""
        wait_until(lambda: len(self.of(kind)) >= count or bool(self._ended), what=f"{kind} event", within_s=120)
        assert len(self.of(kind)) >= count, f"{self._ended} {self.events[-5:]} {logs()}"
        return self.of(kind)[count - 1]

    def outcome(self) -> Outcome:
        """Wait for its end."""
        self._thread.join(180)
        assert self._ended, f"still followed: {self.events[-5:]} {logs()}"
        if isinstance(self._ended[0], Exception):
            raise self._ended[0]
        return self._ended[0]

    @property
    def states(self) -> list[str]:
        """The states of the job, one after the other."""
        return [event["state"] for event in self.of("job")]


def logs() -> str:
    """Return the end of what the nodes of all jobs wrote to standard error."""
    return "\n".join(path.read_text()[-3000:] for path in Path().glob("slurm-*.err"))


def rows_of(steps: Steps) -> list[int]:
    """Return all rows of all steps, sorted."""
    return sorted(row for step in steps.values() for row in step)


def check_exact(arena: Arena) -> None:
    """Each row of the table was consumed once, as the script and the ledger both have it."""
    assert rows_of(arena.journal("r1")) == rows_of(arena.recorded("r1")) == ROWS


def test_range_takes_all_idle_nodes(arena: Arena, slurm: SlurmCluster) -> None:
    """A job of 2 to 3 nodes gets three of three, and trains each row once."""
    arena.table()
    following = Following(arena, nodes="2:3", batch_size=24)
    outcome = following.outcome()
    assert (outcome.ending, outcome.step) == ("finished", arena.lineage("r1")[-1]["step"])
    assert {row["world_size"] for row in arena.lineage("r1")} == {3}
    check_exact(arena)
