"""The lighthouse of replica groups as a process that may hang."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest

from dlac_pipeline.elastic import lighthouse
from dlac_pipeline.elastic.lighthouse import Lighthouse
from dlac_pipeline.elastic.ranks.replicas import read_lighthouse
from tests.conftest import wait_until
from tests.process.test_launch import spec_of


def test_hung_lighthouse_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped still accepts connections. It is killed and started again, and the new one answers."""
    monkeypatch.setattr(lighthouse, "_LOOK_S", 0.1)
    monkeypatch.setattr(lighthouse, "_ANSWERS_WITHIN_S", 1.0)
    served = Lighthouse(spec_of(tmp_path, "pass", replicas=2), tmp_path)
    served.start()
    try:
        wait_until(lambda: read_lighthouse(tmp_path) is not None, what="the lighthouse")
        first = read_lighthouse(tmp_path)
        assert first is not None
        os.kill(first.pid, signal.SIGSTOP)
        wait_until(lambda: served.restart_dead() == "exit status -9", what="its end")
        wait_until(lambda: read_lighthouse(tmp_path) != first, what="the next lighthouse")
        second = read_lighthouse(tmp_path)
        assert second is not None
        assert lighthouse._answers(second.address)
        assert not psutil.pid_exists(first.pid)
    finally:
        served.end()
