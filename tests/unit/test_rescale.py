"""Rescaling for new nodes: ranks have all the time that their checkpoint takes, but a termination notice keeps its deadline."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.checkpoint.restore.resume_point import FreshStart
from dlac_pipeline.checkpoint.step_sync import RankReport, StepSync
from dlac_pipeline.elastic.ranks.launch_folder import notice_file, room_file
from dlac_pipeline.lakehouse.ledger.typed_rows import NODES
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.train.checkpoint_policy import CheckpointPolicy
from tests.small_records import small_spec

HOUR_S = 3600.0
POINT = FreshStart(attempt=1, nonce="n", replaces=0, leg="{}", leg_is_new=True)


@pytest.fixture
def when(tmp_path: Path) -> Iterator[CheckpointPolicy]:
    """Yield the policy of rank 0, in a job for up to two nodes."""
    launch = {"nodes": "1:2", "rendezvous": "host:1", "deadline_s": 25.0}
    spec = small_spec(order={"batch_size": 4, "key_groups": 4, "steps": 1}, launch=launch)
    policy_of_rank_0 = CheckpointPolicy(spec, 0, tmp_path, EventWriter(tmp_path, 0))
    policy_of_rank_0.resumed(POINT)
    yield policy_of_rank_0
    policy_of_rank_0.close()


def event_names(folder: Path) -> list[str]:
    """Return the names of the written events."""
    path = folder / "events.jsonl"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def test_room_waits_for_checkpoint(when: CheckpointPolicy, tmp_path: Path) -> None:
    """Rank 0 reports the rescale after its supervisor's request. The report is no termination notice, and ends no node."""
    assert when.step_done(1, in_background=False) == RankReport()
    room_file(tmp_path).touch()
    assert when.step_done(2, in_background=False) == RankReport(makes_room=True)
    when.on_sync(StepSync(step=2, losses=[0.0], needed_s=HOUR_S, makes_room=True))
    assert when.leaving is not None
    assert when.reason() == NODES
    when.left()
    assert event_names(tmp_path) == []
    assert not notice_file(tmp_path, 0).exists()


@pytest.mark.parametrize("during", [False, True])
def test_notice_beside_rescale_is_reported(when: CheckpointPolicy, tmp_path: Path, during: bool) -> None:
    """A notice with the rescale leaves no time for the checkpoint. One that comes during it keeps its own deadline."""
    beside: dict[str, Any] = {} if during else {"notice": "SIGUSR1", "needed_s": HOUR_S}
    when.on_sync(StepSync(step=2, losses=[0.0], makes_room=True, **beside))
    if during:
        signal.raise_signal(signal.SIGUSR1)
    assert when.reason() == (NODES if during else None)
    when.left()
    assert event_names(tmp_path) == ["preempted"]
    assert notice_file(tmp_path, 0).exists() == during
