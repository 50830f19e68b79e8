"""Leader and follower nodes whose ranks are still starting: they receive stops, and notice lost nodes."""

import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dlac_pipeline.checkpoint.restore.resume_point import FreshStart
from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.round import LEADER, RESUME, VERDICT, Round
from dlac_pipeline.lakehouse.errors import TrainingFailed
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.attempt import Rescale, SupervisedAttempt
from dlac_pipeline.supervise.attempt_state import Observation
from dlac_pipeline.supervise.attempts import Attempts
from dlac_pipeline.supervise.follower_attempt import AttemptVerdict
from dlac_pipeline.supervise.ranks.all_ranks import STOP, AllRanks
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
from dlac_pipeline.supervise.ranks.node_part import NodePart
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from dlac_pipeline.supervise.ranks.run_events import RunEvents
from dlac_pipeline.supervise.start.request import ResumeOptions
from dlac_pipeline.supervise.start.supervised_start import SupervisedStart
from dlac_pipeline.supervise.supervision import StopRequests, Supervision
from tests.conftest import wait_until
from tests.launched_nodes import rounds, silence
from tests.small_records import small_spec

POINT = FreshStart(attempt=1, nonce="n", replaces=0, leg="{}", leg_is_new=True)


class Launch:
    """A launch of a job without a catalog, and the attempts that it makes."""

    def __init__(self, spec: JobSpec, starter: RankStarter) -> None:
        self.spec = spec
        self.stops = StopRequests()
        supervision = Supervision(request=Request(spec=spec), plans=Mock(), stops=self.stops)
        self.attempts = Attempts(supervision, starter, RunEvents(spec.run, lambda event: None))

    def lead(self, round_: Round) -> SupervisedAttempt:
        """Return an attempt that this node leads."""
        assert round_.share.node == LEADER
        return self.attempts.lead(round_, ResumeOptions(), replaces=None, failure=None)


@pytest.fixture
def slow_imports(tmp_path: Path) -> Iterator[Launch]:
    """Yield a launch of a job whose ranks import a library for an hour."""
    (tmp_path / "script.py").touch()
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(3600)\n")
    starter = RankStarter()
    yield Launch(_spec(tmp_path), starter)
    starter.close()


def _spec(folder: Path) -> JobSpec:
    order = {"batch_size": 4, "key_groups": 4, "steps": 1}
    launch = {"script": str(folder / "script.py"), "preload": ["slow_library"]}
    spec = small_spec(order=order, launch=launch).resolved(folder)
    (Path(spec.checkpoint.local) / spec.run).mkdir(parents=True)
    return spec


@contextmanager
def run_on_thread(call: Callable[[], Any]) -> Iterator[Callable[[], Any]]:
    """Run a call on a thread, and yield a function that waits for its result. The ranks' server ends in any case."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        try:
            yield lambda: future.result(300)
        finally:
            fork_server.end_server()


def test_follower_passes_stop_on(slow_imports: Launch) -> None:
    """A follower that knows the resume point does not only wait for its ranks."""
    with rounds(2) as (leader, led):
        attempt = slow_imports.attempts.follow(led, 0)
        leader.announce(RESUME, json.loads(POINT.to_json()))
        with run_on_thread(attempt.run) as verdict:
            wait_until(lambda: _has_resume_point(slow_imports.spec), what="the resume point")
            slow_imports.stops.stop.set()
            wait_until(lambda: leader.message_of(1).get("asked") == STOP, what="its request")
            leader.announce(VERDICT, asdict(AttemptVerdict(ending="stopped", attempt=1)))
            assert verdict().ending == "stopped"


@pytest.mark.slow
def test_follower_notices_lost_leader(slow_imports: Launch) -> None:
    """The follower does not wait for its ranks to end the attempt."""
    with rounds(2, timeout_s=5) as (leader, led):
        leader.publish({})
        leader.announce(RESUME, json.loads(POINT.to_json()))
        with run_on_thread(slow_imports.attempts.follow(led, 0).run) as verdict:
            wait_until(lambda: _has_resume_point(slow_imports.spec), what="the resume point")
            silence(leader)
            assert "which led" in verdict().restart.cause


@pytest.mark.parametrize("leads", [True, False])
def test_kept_rank_ends_copies(slow_imports: Launch, monkeypatch: pytest.MonkeyPatch, leads: bool) -> None:
    """The kernel keeps a killed rank. States in memory are not copied any more."""
    end, ended = RankGroup.end, threading.Event()

    def fail(self: RankGroup) -> None:
        end(self)
        raise TrainingFailed("a killed rank is still there")

    monkeypatch.setattr(RankGroup, "end", fail)
    monkeypatch.setattr(slow_imports.attempts.memory, "end", ended.set)
    with rounds(2) as (leader, led):
        attempt: Any = slow_imports.lead(leader) if leads else slow_imports.attempts.follow(led, 0)
        if leads:
            slow_imports.stops.leave()
            monkeypatch.setattr(SupervisedStart, "claim", lambda start, verifying: verifying(7, 1, 2))
        else:
            leader.announce(VERDICT, asdict(AttemptVerdict(ending="stopped", attempt=1)))
        with run_on_thread(attempt.run) as result, pytest.raises(TrainingFailed, match="still there"):
            result()
    assert ended.is_set()


def test_leader_receives_stop_of_follower(slow_imports: Launch) -> None:
    """The leader receives it before the leader's ranks have started, and stops them."""
    with rounds(2) as (leader, other):
        attempt = slow_imports.lead(leader)
        attempts = slow_imports.attempts
        part = NodePart(slow_imports.spec, leader, "n", starter=attempts.starter, memory=attempts.memory)
        ranks = AllRanks(part.start(), leader)
        with run_on_thread(lambda: attempt._wait_for_start(ranks)) as pids:
            other.publish({"asked": STOP})
            wait_until(lambda: leader.message_of(1).get("asked") == STOP, what="its request")
            wait_until(slow_imports.stops.stop.is_set, what="the stop")
            assert pids() == [0]
        ranks.own.end()


def test_preempted_node_exits_during_rescale(slow_imports: Launch) -> None:
    """One of its ranks is preempted while the node makes room for new nodes. The node does not train with them."""
    with rounds(1) as (alone,):
        without, with_notice = slow_imports.lead(alone), slow_imports.lead(alone)
        assert isinstance(_end_rescale(without, has_notice=False), Rescale)
        assert not slow_imports.stops.leaving.is_set()
        assert _end_rescale(with_notice, has_notice=True) == "stopped"
        assert slow_imports.stops.leaving.is_set()


def test_preempted_leader_stops_no_other_node(slow_imports: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader is preempted while it verifies a checkpoint. The other nodes resume, and a run of one node stops."""
    slow_imports.stops.leave()
    monkeypatch.setattr(SupervisedStart, "claim", lambda start, verifying: verifying(7, 1, 2))
    for nodes, ending in ((2, Rescale), (1, str)):
        with rounds(nodes) as node_rounds:
            attempt = slow_imports.lead(node_rounds[0])
            assert isinstance(attempt.run(), ending)
            assert attempt.number == 0


def _end_rescale(attempt: SupervisedAttempt, *, has_notice: bool) -> Any:
    """Return the end of an attempt whose ranks have exited after a checkpoint, to make room."""
    ranks = Mock(own=Mock(has_notice=has_notice), leaving_nodes=[])
    for observation in (Observation.TRAINING_BEGAN, Observation.ROOM_TO_GROW):
        assert attempt._apply(observation, ranks) is None
    return attempt._apply(Observation.RANKS_EXITED, ranks)


def _has_resume_point(spec: JobSpec) -> bool:
    return any((Path(spec.checkpoint.local) / spec.run).glob("launch-*/resume.json"))
