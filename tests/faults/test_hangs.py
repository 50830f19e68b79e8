"""Ranks that live without progress, or with little: their heartbeats show them, and the reports name the phase."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

import pytest

from dlac_pipeline.lakehouse.iceberg.connect import connect
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor
from tests.conftest import PROGRAMS, Arena, source_rows, wait_until
from tests.object_store import Network, ObjectStore

HANG_S = 15.0
"""Starting a rank may take longer on a busy node, and is no hang. A step or a commit may not."""


def test_deadlocked_collective_is_recovered(campaign: Arena) -> None:
    """Rank 0 waits for a message, rank 1 for its gradients. Both are ended, the hung one is named, and training resumes."""
    settings: dict[str, Any] = {"deadlock_at": 13, "hang_timeout_s": HANG_S, "steps": 20}
    launch = campaign.launch(campaign.spec("deadlocked", **settings))
    assert launch.wait() == 0, launch.stderr
    (failure,) = launch.of("failure")
    assert (failure["phase"], failure["step"]) == ("computing", 12)
    assert "no heartbeat for" in failure["cause"]
    assert "last while computing" in failure["cause"]
    (recovered,) = launch.of("recovered")
    assert (recovered["resumed_step"], recovered["rows_replayed"]) == (10, 64)
    assert recovered["detect_s"] >= HANG_S
    assert campaign.losses("deadlocked") == campaign.losses("reference")[:20]


@pytest.mark.soak
def test_changing_clock_ends_nothing(campaign: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A minute passes at each poll of the supervisor. Training ranks do not hang, and exiting ranks get their time."""
    wall, polls = time.time, count()
    monkeypatch.setattr(time, "time", lambda: wall() + 60.0 * next(polls))
    events: list[dict[str, Any]] = []

    def record(event: dict[str, Any]) -> None:
        events.append(event)
        if event["event"] == "step" and event["step"] >= 3:
            supervisor.stop()

    supervisor = Supervisor(Request(spec=campaign.spec("set", hang_timeout_s=HANG_S, pause_s=0.2)), on_event=record)
    outcome = supervisor.run()
    assert (outcome.ending, outcome.attempts) == ("stopped", 1)
    assert [event for event in events if event["event"] == "failure"] == []
    (last,) = campaign.lineage("set")
    assert last.step == outcome.step >= 3


@pytest.mark.soak
def test_reader_on_dead_store_is_found(arena: Arena, store: ObjectStore, network: Network) -> None:
    """The store accepts connections and sends nothing. The phase is reading, and the run resumes once the store answers."""
    direct = store.lakehouse(arena.home)
    config = direct.model_copy(update={"uri": f"sqlite:///{arena.home}/remote.db"})
    lakehouse = connect(config)
    lakehouse.create_namespace("src")
    rows = source_rows(0, 100_000)
    properties = {"write.parquet.row-group-limit": "1000"}
    lakehouse.catalog.create_table("src.t", rows.schema, properties=properties).append(rows)
    through = {**store.properties(network.url), "s3.request-timeout": "120", "s3.connect-timeout": "120"}
    spec = parse_spec(
        {
            "run": "starved",
            "lakehouse": config.model_copy(update={"properties": through}).model_dump(),
            "source": {"table": "src.t", "columns": ["row_id", "x"]},
            "order": {"batch_size": 256, "key_groups": 4, "block_slices": 1, "seed": 1, "steps": 150},
            "read": {"threads": 1, "budget_mb": 1},
            "checkpoint": {"every_steps": 1000},
            "launch": {"script": str(PROGRAMS / "train_tiny.py"), "hang_timeout_s": HANG_S},
            "params": {"journal": str(arena.home / "journal"), "pause_s": "0.02"},
        },
        origin="the test",
    ).resolved(arena.home)
    launch = arena.launch(spec)
    launch.wait_for("step")
    network.stall()
    failure = launch.wait_for("failure")
    network.mend()
    assert failure["phase"] == "reading", failure
    assert "last while reading" in failure["cause"]
    wait_until(lambda: bool(launch.of("recovered")), what="the recovery")
    assert launch.wait() == 0, launch.stderr
    assert launch.of("ended")[0]["ending"] == "finished"


@pytest.mark.soak
def test_slow_rank_is_named_with_phase(campaign: Arena) -> None:
    """Its forward passes are slow. The other rank waits in steps of the same length, and is not named."""
    settings: dict[str, Any] = {"steps": 12, "slow_rank": 1, "slow_s": 1.2}
    launch = campaign.launch(campaign.spec("uneven", **settings))
    assert launch.wait() == 0, launch.stderr
    reports = [(event["rank"], event["phase"]) for event in launch.of("straggler")]
    assert reports == [(1, "computing")]
    (event,) = launch.of("straggler")
    assert event["own_s"] > 1.2 > 2 * event["median_s"]
