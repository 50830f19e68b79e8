from __future__ import annotations

import gc
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from dlac_pipeline.nodes.rendezvous import Rendezvous, serve
from dlac_pipeline.nodes.talk import EndedElsewhere

from catalog.errors import NodesMissing
from dlac_pipeline.launch_spec import LaunchSpec
from dlac_pipeline.ranks import addresses
from tests.crews import wait_for_spare
from tests.ports import own_port

NEVER = threading.Event()


def join(rendezvous: Rendezvous) -> None:
    """Take part; leave behind the run's end."""
    try:
        assert rendezvous.join(NEVER, lambda: None) is not None
    except EndedElsewhere:
        rendezvous.leave()
        raise


def meet(rendezvous: Rendezvous) -> None:
    """Take part, and look once more behind that, as machines do."""
    join(rendezvous)
    rendezvous.check_goes_on()


def test_loopback_is_named_when_nodes_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hosts file maps a node's own name to 127.0.1.1, where no other node reaches it: the error says what to give."""
    resolved, resolve = [], socket.getaddrinfo

    def lookup(host: object, *args: Any, **options: Any) -> Any:
        resolved.append(host)
        return resolve("127.0.1.1" if host == "node1.cluster" else host, *args, **options)  # type: ignore[arg-type]  # passed on

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    monkeypatch.setattr(addresses, "_routed_address", lambda: "")
    launch = LaunchSpec(
        script="x", nodes="2", rendezvous=f"node1.cluster:{own_port()}", gather_timeout_s=1, last_call_s=1
    )
    with pytest.raises(
        NodesMissing, match=r"'node1.cluster' stands for a loopback address .*: give an IP address, or a name"
    ):
        Rendezvous(launch, "r").join(NEVER, lambda: None)
    assert "node1.cluster" in resolved


def test_one_that_waits_hears_of_the_end_before_who_serves_the_rendezvous_is_gone() -> None:
    """The store goes with the process that serves it: that one leaves once those that wait have heard."""
    address = f"127.0.0.1:{own_port()}"
    launch = LaunchSpec(script="x", nodes="2", rendezvous=address, last_call_s=1, gather_timeout_s=120)
    serves, other, spare = (Rendezvous(launch, "r") for _ in range(3))
    with ThreadPoolExecutor(2) as pool:
        joined = pool.submit(join, serves)
        join(other)
        joined.result()
        waits = pool.submit(join, spare)
        wait_for_spare(address, "r")
        serves.announce({"ending": "stopped"})
        other.leave()
        serves.leave()
        del serves, other  # and their processes end
        gc.collect()
        with pytest.raises(EndedElsewhere) as ended:
            waits.result()
    assert ended.value.words["ending"] == "stopped"


def test_one_that_was_cut_off_hears_what_the_run_has_come_to_meanwhile() -> None:
    """It looks once for what an earlier launch left there: what it finds as it comes back is of its own run."""
    address = f"127.0.0.1:{own_port()}"
    launch = LaunchSpec(script="x", nodes="1:2", rendezvous=address, last_call_s=1, gather_timeout_s=120)
    ready, ends = threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        serving = pool.submit(serve, address, ends, ready.set)
        try:
            assert ready.wait(300)
            before, other, cut_off = (Rendezvous(launch, "r") for _ in range(3))
            join(before)
            before.announce({"ending": "finished"})
            before.leave()
            joined = pool.submit(join, other)
            join(cut_off)
            joined.result()
            cut_off.forget()
            other.announce({"ending": "stopped"})
            other.leave()
            with pytest.raises(EndedElsewhere) as ended:
                meet(cut_off)
        finally:
            ends.set()
        serving.result()
    assert ended.value.words["ending"] == "stopped"
