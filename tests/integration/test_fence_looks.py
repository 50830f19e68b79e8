"""How a launcher under an orchestrator looks whether its run has been taken over."""

import os
import threading
from types import SimpleNamespace

import pytest

from dlac_pipeline.extensions.clusters import serve
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import CatalogUnreachable
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.commits import claim
from dlac_pipeline.lakehouse.ledger.ledger import Ledger, RunState
from dlac_pipeline.spec.launch_request import Request
from tests.conftest import Arena, wait_until

RUN = "r1"


def test_the_fence_is_looked_at_over_one_connection(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection is kept between looks. It is replaced after an outage of the catalog, and a takeover is seen."""
    claim(Ledger(arena.lakehouse), RUN, nonce="n1", replaces=0, facts={"launched_by": "me"})
    opened: list[Lakehouse] = []
    looks: list[str] = []
    away = threading.Event()
    state = Ledger.state

    def opening(config: LakehouseConfig) -> Lakehouse:
        opened.append(connect(config))
        return opened[-1]

    def looking(self: Ledger, run: str) -> RunState:
        if self.lakehouse is arena.lakehouse:
            return state(self, run)
        looks.append(run)
        if away.is_set():
            away.clear()
            raise CatalogUnreachable("the catalog is away")
        return state(self, run)

    monkeypatch.setattr(serve, "connect", opening)
    monkeypatch.setattr(Ledger, "state", looking)
    monkeypatch.setattr(serve, "MARGIN_S", 0.0)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    request = Request(spec=arena.spec(RUN, deadline_s=0.01), launched_by="me", fence_look_s=0.01)
    stopped = threading.Event()
    launched = SimpleNamespace(stop=stopped.set)  # a supervisor without ranks
    watcher = threading.Thread(target=serve.stop_when_replaced, args=(launched, request))
    watcher.start()
    wait_until(lambda: len(looks) >= 3, what="three looks", within_s=120)
    assert len(opened) == 1
    away.set()
    wait_until(lambda: len(opened) == 2, what="another connection", within_s=120)
    assert not stopped.is_set()
    claim(Ledger(arena.lakehouse), RUN, nonce="n2", replaces=1, facts={"launched_by": "another"})
    assert stopped.wait(120)
    watcher.join()
    assert len(opened) == 2
