"""Machines whose ranks still come up listen meanwhile: the one that is led, and the one that leads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.round import LEADER, RESUME, VERDICT, Round
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.attempt import Rescale, SupervisedAttempt
from dlac_pipeline.supervise.attempt_state import Observation
from dlac_pipeline.supervise.choose_leg import RESUME as GOES_ON
from dlac_pipeline.supervise.claim import ResumePoint
from dlac_pipeline.supervise.follower_attempt import AttemptVerdict, FollowerAttempt
from dlac_pipeline.supervise.ranks.all_ranks import STOP, AllRanks
from dlac_pipeline.supervise.ranks.start_ranks import RankStarter, start_local_ranks
from dlac_pipeline.supervise.supervision import Supervision
from tests.conftest import wait_until
from tests.crews import rounds, silence

POINT = ResumePoint(attempt=1, nonce="n", replaces=0, leg="{}", leg_is_new=True)


@pytest.fixture
def imports(tmp_path: Path) -> Iterator[Supervision]:
    """Of a job whose ranks import a library that takes an hour."""
    (tmp_path / "script.py").touch()
    (tmp_path / "slow_library.py").write_text("import time\ntime.sleep(3600)\n")
    starter = RankStarter()
    yield _supervision(_spec(tmp_path), starter)
    starter.close()


def _spec(folder: Path) -> JobSpec:
    raw = {
        "run": "r",
        "source": {"table": "src.t", "columns": ["x"]},
        "order": {"batch_size": 4, "key_groups": 4, "steps": 1},
        "launch": {"script": str(folder / "script.py"), "preload": ["slow_library"]},
    }
    spec = parse_spec(raw, origin="the test").resolved(folder)
    (Path(spec.checkpoint.local) / spec.run).mkdir(parents=True)
    return spec


def _supervision(spec: JobSpec, starter: RankStarter) -> Supervision:
    return Supervision(
        request=Request(spec=spec), lakehouse=Mock(), plans=Mock(), starter=starter, on_event=lambda event: None
    )


@contextmanager
def beside(call: Callable[[], Any], supervision: Supervision) -> Iterator[Callable[[], Any]]:
    """Made on a thread, which ends with the ranks' server in any case; gives what waits for its result."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(call)
        try:
            yield lambda: future.result(300)
        finally:
            fork_server.end_server()


def test_follower_passes_stop_on(imports: Supervision) -> None:
    """Told where the attempt resumes, it does not wait for its ranks alone."""
    with rounds(2) as (leader, led):
        attempt = FollowerAttempt(imports, led, attempt=0)
        leader.announce(RESUME, asdict(POINT))
        with beside(attempt.run, imports) as verdict:
            wait_until(lambda: _resumed(imports.spec), what="its hearing of the resume point")
            imports.stop.set()
            wait_until(lambda: leader.message_of(1).get("asked") == STOP, what="its word")
            leader.announce(VERDICT, AttemptVerdict(ending="stopped", attempt=1).to_message())
            assert verdict().ending == "stopped"


def test_follower_notices_lost_leader(imports: Supervision) -> None:
    """And does not wait for its ranks to end the attempt."""
    with rounds(2, timeout_s=5) as (leader, led):
        leader.publish({})
        leader.announce(RESUME, asdict(POINT))
        attempt = FollowerAttempt(imports, led, attempt=0)
        with beside(attempt.run, imports) as verdict:
            wait_until(lambda: _resumed(imports.spec), what="its hearing of the resume point")
            silence(leader)
            found = verdict()
            assert "which led" in found.restart.cause


def test_leader_receives_stop_of_follower(imports: Supervision) -> None:
    """Before its own ranks have come up, which are told to stop then."""
    with rounds(2) as (leader, other):
        attempt = _leading(imports, leader)
        ranks = AllRanks(start_local_ranks(imports.spec, attempt.folder, leader, imports.starter), leader)
        with beside(lambda: attempt._wait_for_start(ranks), imports) as pids:
            other.publish({"asked": STOP})
            wait_until(lambda: leader.message_of(1).get("asked") == STOP, what="its word")
            wait_until(imports.stop.is_set, what="the stop")
            assert pids() == [0]
        ranks.own.end()


def test_node_leaves_while_making_room(imports: Supervision) -> None:
    """More machines have come, and one of its ranks was told to leave: it does not train on with them."""
    with rounds(1) as (alone,):
        without, with_notice = _leading(imports, alone), _leading(imports, alone)
        assert isinstance(_rescaled(without, has_notice=False), Rescale)
        assert not imports.leaving.is_set()
        assert _rescaled(with_notice, has_notice=True) == "stopped"
        assert imports.leaving.is_set()


def _rescaled(attempt: SupervisedAttempt, *, has_notice: bool) -> Any:
    """The end of an attempt whose ranks have exited after a checkpoint to make room."""
    ranks = Mock(own=Mock(has_notice=has_notice), leaving_nodes=[])
    for observation in (Observation.TRAINING_BEGAN, Observation.ROOM_TO_GROW):
        assert attempt._apply(observation, ranks) is None
    return attempt._apply(Observation.RANKS_EXITED, ranks)


def _leading(supervision: Supervision, crew: Round) -> SupervisedAttempt:
    assert crew.share.node == LEADER
    return SupervisedAttempt(supervision, crew, options=GOES_ON, replaces=None, failure=None)


def _resumed(spec: JobSpec) -> bool:
    return any((Path(spec.checkpoint.local) / spec.run).glob("launch-*/resume.json"))
