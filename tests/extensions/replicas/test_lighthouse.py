"""The lighthouse of replica groups as a process that may hang, and as the supervisor asks it."""

import os
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from dlac_pipeline.extensions.replicas import lighthouse
from dlac_pipeline.extensions.replicas.lighthouse import Lighthouse
from dlac_pipeline.extensions.replicas.rank import read_lighthouse
from tests.conftest import wait_until
from tests.failing_servers import serve_status
from tests.process.test_launch import spec_of


@pytest.mark.slow
def test_hung_lighthouse_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is stopped still accepts connections. It is killed and started again, and the new one answers."""
    monkeypatch.setattr(lighthouse, "LOOK_S", 0.1)
    monkeypatch.setattr(lighthouse, "ANSWERS_WITHIN_S", 1.0)
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
        assert lighthouse.answers(second.address)
        assert not psutil.pid_exists(first.pid)
    finally:
        served.end()


def test_lighthouse_is_asked_without_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names a proxy for all addresses, which answers 502 for one of this node."""
    with serve_status(200) as address, serve_status(502) as proxy:
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(urllib.request, "_opener", None)  # it has the proxies of the first call
        assert lighthouse.answers(address)
