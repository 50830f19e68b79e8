"""All ranks of an attempt in the view of the leading node: reports of following nodes, lost nodes, and the first failure."""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.elastic import fork_server
from dlac_pipeline.elastic.ranks.launch_folder import in_hand_file
from dlac_pipeline.elastic.round import LEADER, Round
from dlac_pipeline.spec.job_spec import JobSpec
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase, RankHeartbeat
from dlac_pipeline.supervise.ranks.all_ranks import LEAVE, LOST, REQUESTS_REPORTS, AllRanks, report_of
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
from dlac_pipeline.supervise.ranks.rank_starter import RankStarter
from tests.conftest import wait_until
from tests.launched_nodes import rounds, silence
from tests.small_records import small_spec

WAITS = """
import os, sys, time
from pathlib import Path
status = Path(os.environ["DLAC_LAUNCH"]) / f"exit-{os.environ['RANK']}"
while not status.exists():
    time.sleep(0.02)
sys.exit(int(status.read_text()))
"""
"""A script that exits with the status in a file of its launch folder."""


class LaunchedNodes:
    """Several nodes with one rank each, and the leader's view of all ranks."""

    def __init__(self, groups: list[RankGroup], node_rounds: list[Round]) -> None:
        self.groups = groups
        self.node_rounds = node_rounds
        self.all_ranks = AllRanks(groups[LEADER], node_rounds[LEADER])

    def exit_rank(self, rank: int, code: int) -> None:
        """End a rank with an exit status."""
        status = self.groups[rank].folder / f"exit-{rank}"
        (written := status.with_suffix(".new")).write_text(str(code))
        written.rename(status)  # the rank polls for the file, and an empty one is no status
        wait_until(self.groups[rank].all_exited, what="its end")

    def publish_report(self, place: int, **changes: Any) -> None:
        """Publish one report of a follower."""
        answers = bool(self.node_rounds[place].message_of(LEADER).get(REQUESTS_REPORTS))
        report = report_of(self.groups[place], asked=str(changes.pop("asked", "")), answers=answers)
        self.node_rounds[place].publish({**report, **changes})

    def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait for a condition, while all followers publish their reports."""

        def look() -> bool:
            for place in self.node_rounds[LEADER].others:
                self.publish_report(place)
            return bool(holds())

        wait_until(look, what=what)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobSpec]:
    """A job whose ranks wait for their exit status. One fork server starts the ranks of all tests."""
    folder = tmp_path_factory.mktemp("job")
    (folder / "script.py").write_text(WAITS)
    order = {"batch_size": 4, "key_groups": 4, "steps": 1}
    spec = small_spec(order=order, launch={"script": str(folder / "script.py")}).resolved(folder)
    (Path(spec.checkpoint.local) / spec.run).mkdir(parents=True)
    yield spec
    fork_server.end_server()


@pytest.fixture
def pair(waiting: JobSpec, tmp_path: Path) -> Iterator[LaunchedNodes]:
    """Two nodes."""
    with launched_nodes(waiting, tmp_path, 2) as made:
        yield made


@contextmanager
def launched_nodes(spec: JobSpec, folder: Path, count: int, *, timeout_s: int = 60) -> Iterator[LaunchedNodes]:
    """Yield `count` nodes with a launch folder each."""
    with rounds(count, timeout_s=timeout_s) as running_rounds, ExitStack() as stack:
        groups = []
        for place, node_round in enumerate(running_rounds):
            (launch := folder / f"launch-{place}").mkdir()
            groups.append(RankStarter().start(spec, launch, node_round.share))
            stack.callback(groups[-1].end)
        wait_until(lambda: all(all(group.processes.pids) for group in groups), what="the ranks")
        yield LaunchedNodes(groups, running_rounds)


def test_remote_progress_reaches_leader_folder(pair: LaunchedNodes) -> None:
    """Heartbeats by the leader's clock, and the batch in hand, reach the folder."""
    assert pair.all_ranks.heartbeats() == [None, None]
    folder = pair.groups[1].folder
    HeartbeatFile(folder, 1).write(7, Phase.TRAINING, loss_step=7, loss=0.5)
    in_hand_file(folder, 1).write_text("[8, []]")
    hour_s = 3600.0

    def has_arrived() -> bool:
        pair.publish_report(1, now=time.time() - hour_s)  # its clock is an hour late
        return pair.all_ranks.heartbeats()[1] is not None

    wait_until(has_arrived, what="the other rank's progress")
    found = pair.all_ranks.heartbeats()[1]
    assert found is not None
    assert (found.step, found.loss) == (7, 0.5)
    assert found.at == pytest.approx(time.time() + hour_s, abs=600.0)
    assert in_hand_file(pair.groups[0].folder, 1).read_text() == "[8, []]"


def test_remote_heartbeat_is_copied_once(pair: LaunchedNodes) -> None:
    """The heartbeat is sent again with other clocks, and stays the same. A leader with a full disk copies it later."""
    HeartbeatFile(pair.groups[1].folder, 1).write(7, Phase.TRAINING)
    folder = pair.groups[LEADER].folder
    folder.rename(moved := folder.with_name("moved"))
    pair.until(lambda: pair.node_rounds[LEADER].message_of(1).get("progress"), "its report")
    assert pair.all_ranks.heartbeats() == [None, None]
    moved.rename(folder)
    late_s = 0.0

    def copied_heartbeat() -> RankHeartbeat | None:
        nonlocal late_s
        late_s += 100.0
        pair.publish_report(1, now=time.time() - late_s)
        return pair.all_ranks.heartbeats()[1]

    wait_until(lambda: copied_heartbeat() is not None, what="the other rank's progress")
    first = copied_heartbeat()
    beats = int(pair.node_rounds[LEADER].message_of(1)["beat"]) + 3
    wait_until(
        lambda: bool(copied_heartbeat()) and pair.node_rounds[LEADER].message_of(1)["beat"] > beats, what="more reports"
    )
    assert copied_heartbeat() == first


def test_failure_is_reported_after_all_nodes(pair: LaunchedNodes) -> None:
    """A failure here may be a consequence: a rank of another node failed first, and that node has not reported it yet."""
    pair.until(lambda: pair.node_rounds[LEADER].message_of(1).get("progress") is not None, "its report")
    pair.exit_rank(1, 3)
    pair.exit_rank(0, 1)
    assert pair.all_ranks.failures() == []  # the other node must answer first
    pair.until(pair.all_ranks.failures, "the failures")
    assert [(each.rank, each.code) for each in pair.all_ranks.failures()] == [(0, 1), (1, 3)]
    assert pair.all_ranks.log_end(1)["log"].startswith(str(pair.groups[1].folder))


@pytest.mark.soak
def test_lost_node_precedes_consequences(waiting: JobSpec, tmp_path: Path) -> None:
    """The second of three nodes is lost. The third one's rank fails as a consequence, before the third node has answered."""
    with launched_nodes(waiting, tmp_path, 3, timeout_s=5) as three:
        three.until(lambda: all(three.node_rounds[LEADER].message_of(place) for place in (1, 2)), "their reports")
        silence(three.node_rounds[1])
        three.exit_rank(2, 1)

        def has_failures() -> bool:
            three.publish_report(2)
            return bool(three.all_ranks.failures())

        wait_until(has_failures, what="the failures")
        found = three.all_ranks.failures()
        if found[0].kind != LOST:  # the failed rank was reported before the node counted as lost
            wait_until(lambda: three.all_ranks.failures()[0].kind == LOST, what="the loss")
            found = three.all_ranks.failures()
        assert [(each.rank, each.kind) for each in found] == [(1, LOST), (2, "")]
        assert re.search(r"node host-1 \(1 ranks\) sent no heartbeat for \d+ s", found[0].message)


def test_recovered_node_ends_no_attempt(waiting: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose heartbeat was late for a moment is no failure later, and the ranks train to their end."""
    with launched_nodes(waiting, tmp_path, 3) as three:
        three.until(lambda: all(three.node_rounds[LEADER].message_of(place) for place in (1, 2)), "their messages")
        with monkeypatch.context() as silent:
            silent.setattr(three.node_rounds[LEADER], "lost_nodes", lambda: [1])
            looks = three.node_rounds[LEADER].looks
            wait_until(lambda: three.node_rounds[LEADER].looks > looks, what="another read of the store")
            assert three.all_ranks.failures() == []  # the third node must answer first
        for rank in range(3):
            three.exit_rank(rank, 0)
        three.until(three.all_ranks.all_exited, "the end of all")
        assert three.all_ranks.failures() == []


def test_exit_needs_report_of_every_node(pair: LaunchedNodes) -> None:
    """The leader's own ranks are not enough."""
    pair.exit_rank(0, 0)
    assert not pair.all_ranks.all_exited()
    pair.exit_rank(1, 0)
    pair.until(pair.all_ranks.all_exited, "the end of all")
    assert pair.all_ranks.failures() == []


def test_failed_ranks_have_not_ended(pair: LaunchedNodes) -> None:
    """If all ranks end before the second node answers, the attempt has failed, and has not ended in order."""
    pair.exit_rank(0, 1)
    pair.exit_rank(1, 1)
    failed: list[Any] = []

    def reported() -> bool:
        failed[:] = pair.all_ranks.failures()
        return bool(pair.node_rounds[LEADER].message_of(1).get("exited", False))

    pair.publish_report(1)
    wait_until(reported, what="the other node's report")
    assert not failed
    assert not pair.all_ranks.all_exited()
    pair.until(pair.all_ranks.failures, "the answer")


def test_preempted_node_is_named(pair: LaunchedNodes) -> None:
    """The leader knows the preempted node by its name. A node that was asked to stop the run is another case."""
    assert (pair.all_ranks.leaving_nodes, pair.all_ranks.stop_requested) == ([], False)

    def is_known() -> bool:
        pair.publish_report(1, asked=LEAVE)
        return pair.all_ranks.leaving_nodes == ["host-1"]

    wait_until(is_known, what="its request")
    assert not pair.all_ranks.stop_requested
