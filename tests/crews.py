"""Several machines: jobs that they train together, and what holds of them in the end; and crews that talk in one process."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.nodes.crew import Crew
from dlac_pipeline.nodes.rendezvous_state import decode_state
from dlac_pipeline.nodes.shares import Offer, shares
from dlac_pipeline.nodes.talk import Round, Talk
from tests.conftest import wait_until
from tests.ports import own_port

if TYPE_CHECKING:
    from dlac_pipeline.spec import JobSpec
    from tests.conftest import Arena, Launch


@contextmanager
def crews(count: int, *, patience_s: float = 60.0) -> Iterator[list[Crew]]:
    """So many machines of one attempt with a rank each, by their places; their talk goes through a real store.

    None counts as lost because this process was not given the processor for a while: who is to be lost says `patience_s`.
    """
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    offers = [Offer(host=f"host-{place}", address="127.0.0.1", ranks=1) for place in range(count)]
    found = shares(offers, batch_size=count, port=1)

    def crew(place: int) -> Crew:
        store = TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)
        met = Round(index=place, count=count, store=store, waiting=lambda: 0, address="127.0.0.1")
        talk = Talk(met, {}, patience_s=patience_s)
        return Crew(found[place], all_shares=found, offers=offers, places=range(count), talk=talk)

    with ExitStack() as stack:
        yield [stack.enter_context(crew(place)) for place in range(count)]


def job(campaign: Arena, run: str, **changes: Any) -> JobSpec:
    """Such a job under a name."""
    settings = {
        "nodes": "1:2",
        "nproc_per_node": 1,
        "rendezvous": f"127.0.0.1:{own_port()}",
        "gather_timeout_s": 60,
        "last_call_s": 2,
        "node_timeout_s": 6,
        "verify_together_mb": 0,
        "noise": 0,
        "passes": 1,
        "pause_s": 0.25,
    }
    return campaign.spec(run, **{**settings, **changes})


def leader_of(launches: list[Launch]) -> Launch:
    """Of launches that train together the one that claimed."""
    leaders = [launch for launch in launches if launch.of("attempt") and "leader" not in launch.of("attempt")[-1]]
    assert len(leaders) == 1
    return leaders[0]


def trained_together(campaign: Arena, spec: JobSpec, nodes: int = 2) -> list[Launch]:
    """So many launches of one job, once they have committed a checkpoint together: the leader first."""
    launches = [campaign.launch(spec) for _ in range(nodes)]
    wait_for_checkpoint(campaign, spec.run, nodes)
    leader = leader_of(launches)
    return [leader, *(launch for launch in launches if launch is not leader)]


def wait_for_checkpoint(campaign: Arena, run: str, world_size: int) -> None:
    """Wait for one by so many ranks; whoever is there first may have begun by itself."""
    wait_until(
        lambda: any(row["world_size"] == world_size for row in campaign.rows(run, "checkpoint")),
        what=f"a checkpoint of {world_size} ranks",
    )


def wait_for_spare(address: str, name: str) -> None:
    """Wait until a machine waits beside those that take part in a rendezvous, by its own record."""
    host, _, port = address.rpartition(":")
    store = TCPStore(host, int(port), None, False, wait_for_workers=False)
    key = f"torch.rendezvous.{name}"

    def waits() -> bool:
        state = decode_state(base64.b64decode(store.get(key)))
        return bool(state.redundancy_list or state.wait_list)

    wait_until(waits, what="a spare at the rendezvous")


def check_exact(campaign: Arena, run: str, world_sizes: list[int], **changes: Any) -> None:
    """The global batches are those of an undisturbed run, the losses too but for rounding, each row is there once.

    `world_sizes` are the last ones that the run had; `changes` those of its job that the undisturbed one has as well.
    """
    if campaign.head("alone") is None:
        alone = campaign.launch(job(campaign, "alone", nodes="", world_size=1, pause_s=0, **changes))
        assert alone.wait() == 0, alone.stderr
    sizes = [row["world_size"] for row in campaign.lineage(run)]
    distinct = [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]
    assert distinct[-len(world_sizes) :] == world_sizes
    assert campaign.journal(run) == campaign.journal("alone")
    assert sorted(chain(*campaign.recorded(run).values())) == sorted(chain(*campaign.journal(run).values()))
    assert campaign.losses(run) == pytest.approx(campaign.losses("alone"), rel=1e-5)
    assert audit_run(campaign.lakehouse, run).exact
