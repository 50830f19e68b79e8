"""All ranks of an attempt as the machine sees them that leads it: what others tell of theirs, who is lost, what broke first."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.elastic.ranks.launch_folder import in_hand_file
from dlac_pipeline.elastic.round import LEADER, Round
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.supervise.liveness.heartbeat import HeartbeatFile, Phase, RankHeartbeat
from dlac_pipeline.supervise.ranks.all_ranks import LEAVE, LOST, REQUESTS_REPORTS, AllRanks, report_of
from dlac_pipeline.supervise.ranks.local_ranks import RankGroup
from dlac_pipeline.supervise.ranks.start_ranks import RankStarter
from tests.conftest import wait_until
from tests.crews import rounds, silence

WAITS = """
import os, sys, time
from pathlib import Path
told = Path(os.environ["DLAC_LAUNCH"]) / f"exit-{os.environ['RANK']}"
while not told.exists():
    time.sleep(0.02)
sys.exit(int(told.read_text()))
"""
"""Ends with the status that a file in its launch folder says."""


class Machines:
    """One rank on each of several machines, and the fleet that the first leads."""

    def __init__(self, groups: list[RankGroup], crews: list[Round]) -> None:
        self.groups = groups
        self.crews = crews
        self.fleet = AllRanks(groups[LEADER], crews[LEADER])

    def exits(self, rank: int, code: int) -> None:
        """Have a rank end."""
        (self.groups[rank].folder / f"exit-{rank}").write_text(str(code))
        wait_until(self.groups[rank].all_exited, what="its end")

    def say(self, place: int, **changes: Any) -> None:
        """What a machine that is led says again and again, once."""
        answers = bool(self.crews[place].message_of(LEADER).get(REQUESTS_REPORTS))
        words = report_of(self.groups[place], asked=str(changes.pop("asked", "")), answers=answers)
        self.crews[place].publish({**words, **changes})

    def until(self, holds: Callable[[], Any], what: str) -> None:
        """Wait, while all that are led say how they are."""

        def look() -> bool:
            for place in self.crews[LEADER].others:
                self.say(place)
            return bool(holds())

        wait_until(look, what=what)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Machines]:
    """Two machines."""
    with machines(tmp_path, 2) as made:
        yield made


@contextmanager
def machines(folder: Path, count: int, *, timeout_s: int = 60) -> Iterator[Machines]:
    """So many, with a launch folder each."""
    spec = waiting_job(folder)
    with rounds(count, timeout_s=timeout_s) as talking, ExitStack() as stack:
        groups = []
        for place, crew in enumerate(talking):
            (launch := folder / f"launch-{place}").mkdir()
            groups.append(RankStarter().start(spec, launch, crew.share))
            stack.callback(groups[-1].end)
        yield Machines(groups, talking)


def waiting_job(folder: Path) -> JobSpec:
    """A job whose ranks wait until they are told to end."""
    (folder / "script.py").write_text(WAITS)
    return parse_spec(
        {
            "run": "r",
            "source": {"table": "src.t", "columns": ["x"]},
            "order": {"batch_size": 4, "key_groups": 4, "steps": 1},
            "launch": {"script": str(folder / "script.py"), "start": "spawn"},
        },
        origin="the test",
    )


def test_remote_progress_reaches_leader_folder(pair: Machines) -> None:
    """Signs of life by the leader's clock, and the batch in hand."""
    assert pair.fleet.heartbeats() == [None, None]
    folder = pair.groups[1].folder
    HeartbeatFile(folder, 1).write(7, Phase.TRAINING, loss_step=7, loss=0.5)
    in_hand_file(folder, 1).write_text("[8, []]")
    hour_s = 3600.0

    def brought() -> bool:
        pair.say(1, now=time.time() - hour_s)  # its clock is behind
        return pair.fleet.heartbeats()[1] is not None

    wait_until(brought, what="the other rank's progress")
    found = pair.fleet.heartbeats()[1]
    assert found is not None
    assert (found.step, found.loss) == (7, 0.5)
    assert found.at == pytest.approx(time.time() + hour_s, abs=600.0)
    assert in_hand_file(pair.groups[0].folder, 1).read_text() == "[8, []]"


def test_unwritten_sign_is_copied_later(pair: Machines) -> None:
    """A disk that is full or away for a moment ends no run that is led from there."""
    HeartbeatFile(pair.groups[1].folder, 1).write(7, Phase.TRAINING)
    folder = pair.groups[LEADER].folder
    folder.rename(away := folder.with_name("away"))
    pair.until(lambda: pair.crews[LEADER].message_of(1).get("progress"), "its words")
    assert pair.fleet.heartbeats() == [None, None]
    away.rename(folder)
    pair.until(lambda: pair.fleet.heartbeats()[1] is not None, "the other rank's progress")


def test_remote_sign_is_copied_once(pair: Machines) -> None:
    """It is told again and again, by clocks that differ a little more or less each time, and stays the same sign."""
    HeartbeatFile(pair.groups[1].folder, 1).write(7, Phase.TRAINING)
    behind_s = 0.0

    def told() -> RankHeartbeat | None:
        nonlocal behind_s
        behind_s += 100.0
        pair.say(1, now=time.time() - behind_s)
        return pair.fleet.heartbeats()[1]

    wait_until(lambda: told() is not None, what="the other rank's progress")
    first = told()
    beats = int(pair.crews[LEADER].message_of(1)["beat"]) + 3
    wait_until(lambda: bool(told()) and pair.crews[LEADER].message_of(1)["beat"] > beats, what="more words")
    assert told() == first


def test_failure_is_reported_after_all_nodes(pair: Machines) -> None:
    """What broke here may have begun elsewhere: the other machine's rank died first, and had told nobody yet."""
    pair.until(lambda: pair.crews[LEADER].message_of(1).get("progress") is not None, "its words")
    pair.exits(1, 3)
    pair.exits(0, 1)
    assert pair.fleet.failures() == []  # the other one is asked
    pair.until(pair.fleet.failures, "the failures")
    assert [(each.rank, each.code) for each in pair.fleet.failures()] == [(0, 1), (1, 3)]
    assert pair.fleet.log_end(1)["log"].startswith(str(pair.groups[1].folder))


def test_silent_node_precedes_its_consequences(tmp_path: Path) -> None:
    """Of three: the second one goes, the third one's rank dies of that and is still asked."""
    with machines(tmp_path, 3, timeout_s=5) as three:
        three.until(lambda: all(three.crews[LEADER].message_of(place) for place in (1, 2)), "their words")
        silence(three.crews[1])
        three.exits(2, 1)

        def told() -> bool:
            three.say(2)
            return bool(three.fleet.failures())

        wait_until(told, what="the failures")
        found = three.fleet.failures()
        if found[0].kind != LOST:  # the dead rank was heard of before the machine was silent for long enough
            wait_until(lambda: three.fleet.failures()[0].kind == LOST, what="the loss")
            found = three.fleet.failures()
        assert [(each.rank, each.kind) for each in found] == [(1, LOST), (2, "")]
        assert re.search(r"node host-1 \(1 ranks\) sent no heartbeat for \d+ s", found[0].message)


def test_all_have_exited_once_every_machine_says_so(pair: Machines) -> None:
    """Its own ranks are not enough."""
    pair.exits(0, 0)
    assert not pair.fleet.all_exited()
    pair.exits(1, 0)
    pair.until(pair.fleet.all_exited, "the end of all")
    assert pair.fleet.failures() == []


def test_failed_ranks_have_not_just_exited(pair: Machines) -> None:
    """All ranks have ended before the other node answers: the attempt has failed, and has not come to its end."""
    pair.exits(0, 1)
    pair.exits(1, 1)
    failed: list[Any] = []

    def reported() -> bool:
        failed[:] = pair.fleet.failures()
        return pair.crews[LEADER].message_of(1).get("exited", False)

    pair.say(1)
    wait_until(reported, what="the other node's report")
    assert not failed
    assert not pair.fleet.all_exited()
    pair.until(pair.fleet.failures, "the answer")


def test_who_was_told_to_leave_is_named(pair: Machines) -> None:
    """By its host; a machine that was told to stop the run is another matter."""
    assert (pair.fleet.leaving_nodes, pair.fleet.stop_requested) == ([], False)

    def left() -> bool:
        pair.say(1, asked=LEAVE)
        return pair.fleet.leaving_nodes == ["host-1"]

    wait_until(left, what="its word")
    assert not pair.fleet.stop_requested
