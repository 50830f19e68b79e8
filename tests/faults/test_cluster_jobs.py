"""The job that Kubernetes would get, run by TorchX as processes of this machine: a node each, with a supervisor of its own."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from dlac_pipeline.launchers.cluster import ClusterJob

from dlac_pipeline.recover.supervise import Outcome
from dlac_pipeline.request import Request
from dlac_pipeline.spec import parse_spec
from tests.cluster import Processes
from tests.conftest import Steps, wait_until
from tests.ports import own_port

if TYPE_CHECKING:
    from tests.conftest import Arena

pytestmark = pytest.mark.soak
Events = list[dict[str, Any]]


def job(arena: Arena, run: str, *, nodes: str, **changes: Any) -> tuple[ClusterJob, Events]:
    """A job of several nodes with a rank each, and the events that come of it."""
    spec = arena.spec(run, on="kubernetes", nodes=nodes, nproc_per_node=1, passes=1, **changes)
    node = {"image": str(arena.home), "python": sys.executable, "port": own_port()}
    raw = spec.model_dump() | {"cluster": node}
    request = Request(spec=parse_spec(raw, origin="the test"), repin=True)
    events: Events = []
    logs = Path(arena.home) / f"logs-{run}"
    return ClusterJob(request, Processes(request.spec, logs), events.append, look_s=0.5), events


def running(cluster_job: ClusterJob) -> Callable[[], Outcome]:
    """Run it on a thread; what is returned waits for its outcome."""
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(cluster_job.run()))
    thread.start()

    def outcome() -> Outcome:
        thread.join(150)
        return found[0]

    return outcome


def rows_of(steps: Steps) -> list[int]:
    """All rows of all steps, sorted."""
    return sorted(row for step in steps.values() for row in step)


def test_a_job_of_two_nodes_trains_to_its_end(arena: Arena) -> None:
    """Both nodes meet by what the job gives them; every row is consumed once, and the launcher hears of each checkpoint."""
    arena.table()
    cluster_job, events = job(arena, "r1", nodes="2")
    outcome = cluster_job.run()
    assert (outcome.ending, outcome.step) == ("finished", arena.lineage("r1")[-1]["step"])
    said = {event["checkpoint_id"] for event in events if event["event"] == "checkpoint"}
    assert said == {row["checkpoint_id"] for row in arena.lineage("r1")}
    assert {row["world_size"] for row in arena.lineage("r1")} == {2}
    assert rows_of(arena.journal("r1")) == rows_of(arena.recorded("r1")) == list(range(2000))


def test_a_job_that_is_stopped_leaves_a_checkpoint_and_the_next_goes_on(arena: Arena) -> None:
    """Cancelled, its nodes checkpoint and leave; the next job trains the rest, each row once."""
    arena.table()
    stopped, events = job(arena, "r1", nodes="2", slow_rank=0, slow_s=0.05)
    outcome = running(stopped)
    wait_until(lambda: any(event["event"] == "checkpoint" for event in events), what="a checkpoint")
    stopped.stop()
    assert outcome().ending == "stopped"
    done = arena.lineage("r1")[-1]["step"]
    again, _ = job(arena, "r1", nodes="2")
    assert again.run().ending == "finished"
    assert done < arena.lineage("r1")[-1]["step"]
    assert rows_of(arena.journal("r1")) == list(range(2000))
