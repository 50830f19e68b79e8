"""The door of observers: the one for stragglers, and one of another author, observe the ranks of an attempt."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dlac_pipeline.spec.launch_spec import LaunchSpec
from dlac_pipeline.supervise.attempt_monitor import OBSERVERS, AttemptMonitor
from tests.extensions.stragglers.test_stragglers import signs
from tests.installed import install_distribution

_FIRST = """
class First:
    def __init__(self):
        self.ranks = 0

    def observe(self, heartbeats):
        if not self.ranks:
            self.ranks = len(heartbeats)
            yield {"event": "first", "ranks": self.ranks}
"""


@pytest.fixture
def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The published events. An observer of another distribution is installed."""
    install_distribution(
        tmp_path, "first", {"first_observer": _FIRST}, {OBSERVERS.group: ["first = first_observer:First"]}
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    return []


def watched(events: list[dict[str, Any]]) -> AttemptMonitor:
    """Return the monitor of an attempt that recovers from nothing."""
    recorder: Any = SimpleNamespace(observe=lambda heartbeats, publish: None)
    return AttemptMonitor(recorder, LaunchSpec(script="train.py"), events.append)


def test_observers_wait_for_all_ranks(events: list[dict[str, Any]]) -> None:
    """Nothing is observed before each rank has sent a heartbeat."""
    monitor = watched(events)
    monitor.observe([*signs(1, computing=[1.0]), None])
    assert events == []
    monitor.observe(signs(1, computing=[1.0, 1.0]))
    assert events == [{"event": "first", "ranks": 2}]


def test_each_attempt_has_observers(events: list[dict[str, Any]]) -> None:
    """Observers of one attempt remember it. Those of the next one begin again, and all of them report."""
    for _ in range(2):
        monitor = watched(events)
        monitor.observe(signs(0, computing=[0.0, 0.0]))
        monitor.observe(signs(5, computing=[5.0, 20.0]))
    assert [each["event"] for each in events] == ["first", "straggler"] * 2
    assert (events[1]["rank"], events[1]["phase"]) == (1, "computing")
