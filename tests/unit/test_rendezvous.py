from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dlac_pipeline.launch_spec import LaunchSpec
from dlac_pipeline.nodes.rendezvous import Rendezvous, serve
from dlac_pipeline.nodes.talk import EndedElsewhere
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
