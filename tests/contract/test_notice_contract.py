"""The door of termination notices: the URL of a cloud, and a source of another author."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import requests

from dlac_pipeline.lakehouse.doors import Door
from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.train import termination_notice
from dlac_pipeline.train.termination_notice import AwaitNotice, Notices
from tests.installed import install_distribution

LAUNCH = LaunchSpec(script="x", termination_url="http://node.test/", deadline_s=600)
_FILE = """
import requests

def await_file(launch, wait):
    with requests.Session() as session:
        while session.get(launch.termination_url).status_code != 200:
            if wait(1.0):
                return False
    return True
"""


@pytest.fixture(params=["url", "file"])
def source(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AwaitNotice:
    """A source of notices, which the ranks of a node load."""
    if request.param == "file":
        points = {"test.notices": ["url = notice_file:await_file"]}
        monkeypatch.syspath_prepend(str(install_distribution(tmp_path, "notice", {"notice_file": _FILE}, points)))
        monkeypatch.setattr(termination_notice, "NOTICE_SOURCES", Door("test.notices", "source of notices"))
    found: AwaitNotice = termination_notice.NOTICE_SOURCES.load("url", setting="the test")
    return found


@pytest.fixture(autouse=True)
def statuses(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The next answers of the URL. After these its status is 404."""
    answers: list[int] = []

    def get(*session: Any, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(status_code=answers.pop(0) if answers else 404, text="")

    monkeypatch.setattr(requests.Session, "get", get)
    return answers


def test_announcement_ends_the_wait(source: AwaitNotice, statuses: list[int]) -> None:
    """The source waits between its looks, and returns once a termination is announced."""
    waits: list[float] = []
    statuses += [404, 404, 200]

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        return False

    assert source(LAUNCH, wait)
    assert len(waits) == 2


def test_rank_receives_announcement(source: AwaitNotice, statuses: list[int]) -> None:
    """The first rank of a node notes the announcement as its first notice."""
    statuses.append(200)
    notices = Notices(LAUNCH, local_rank=0, launched=False, on_deadline=lambda: None)
    try:
        for thread in threading.enumerate():
            if thread.name == "termination-url":
                thread.join(60)
        assert notices.first is not None
        assert notices.first.name == "termination_url"
    finally:
        notices.close()
