"""The lighthouse of replica groups as a process that may hang, and as the supervisor asks it. The server of a group's state."""

import os
import signal
import urllib.request
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
from cryptography.exceptions import InvalidTag

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


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # PyTorch's, of what it has received
def test_only_the_key_opens_a_state() -> None:
    """A newcomer on another node loads the state of a peer with its key. One with another key loads nothing."""
    peers = pytest.importorskip("dlac_pipeline.extensions.replicas.peers")
    limit, state = timedelta(seconds=10), {"step": 7, "weights": torch.arange(3.0)}
    peer, newcomer, stranger = (peers.StateServer(limit, "127.0.0.1", bytes([each] * 32)) for each in (1, 1, 2))
    peer.send_checkpoint([1], 7, state, limit)
    found = newcomer.recv_checkpoint(0, peer.metadata(), 7, limit)
    assert (found["step"], found["weights"].tolist()) == (7, [0.0, 1.0, 2.0])
    with pytest.raises(InvalidTag):
        stranger.recv_checkpoint(0, peer.metadata(), 7, limit)
    for each in (peer, newcomer, stranger):
        each.shutdown(wait=False)
