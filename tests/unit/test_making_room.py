"""Ranks that leave for more machines have all the time that their checkpoint takes; a notice still has its deadline."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from dlac_pipeline.checkpoint.step_sync import RankReport, StepSync
from dlac_pipeline.elastic.ranks.launch_folder import notice_file, room_file
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_spec import NODES
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.supervise.ranks.rank_events import EventWriter
from dlac_pipeline.train.checkpoint_policy import CheckpointPolicy

HOUR_S = 3600.0
POINT = ResumePoint(attempt=1, nonce="n", replaces=0, leg="{}", leg_is_new=True)


@pytest.fixture
def when(tmp_path: Path) -> Iterator[CheckpointPolicy]:
    """Of rank 0, of a job for up to two machines."""
    launch = {"script": "x", "nodes": "1:2", "rendezvous": "host:1", "grace_s": 25.0}
    order = {"batch_size": 4, "key_groups": 4, "steps": 1}
    raw = {"run": "r", "source": {"table": "src.t", "columns": ["x"]}, "order": order, "launch": launch}
    made = CheckpointPolicy(parse_spec(raw, origin="the test"), 0, tmp_path, EventWriter(tmp_path, 0))
    made.resumed(POINT, Mock())
    yield made
    made.close()


def said(folder: Path) -> list[str]:
    """The events."""
    path = folder / "events.jsonl"
    return [json.loads(line)["event"] for line in path.read_text().splitlines()] if path.exists() else []


def test_room_waits_for_checkpoint(when: CheckpointPolicy, tmp_path: Path) -> None:
    """Rank 0 says so once its supervisor does; for nobody is it a notice, nor the end by which a machine leaves."""
    assert when.step_done(1, in_background=False) == RankReport()
    room_file(tmp_path).touch()
    assert when.step_done(2, in_background=False) == RankReport(makes_room=True)
    when.on_sync(StepSync(2, [0.0], needed_s=HOUR_S, makes_room=True))
    assert when.leaving is not None
    assert when.reason() == NODES
    when.left()
    assert said(tmp_path) == []
    assert not notice_file(tmp_path, 0).exists()


def test_a_notice_counts_beside_it(when: CheckpointPolicy, tmp_path: Path) -> None:
    """Heard with it, there is no time for such a checkpoint; heard behind it, it is told."""
    when.on_sync(StepSync(2, [0.0], notice="SIGUSR1", needed_s=HOUR_S, makes_room=True))
    assert when.reason() is None
    when.left()
    assert said(tmp_path) == ["preempted"]


def test_a_notice_while_room_is_made_is_told(when: CheckpointPolicy, tmp_path: Path) -> None:
    """The checkpoint is under way; its rank keeps the deadline by itself."""
    when.on_sync(StepSync(2, [0.0], makes_room=True))
    signal.raise_signal(signal.SIGUSR1)
    assert when.reason() == NODES
    when.left()
    assert said(tmp_path) == ["preempted"]
    assert notice_file(tmp_path, 0).exists()
