"""Several nodes: jobs that they train together with checks of their end, and rounds of nodes in one process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's __init__ does not re-export by name

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.elastic.nodes.node_heartbeat import NodeHeartbeat
from dlac_pipeline.elastic.rank_assignment import Offer
from dlac_pipeline.elastic.round import Round
from dlac_pipeline.elastic.sealed_store import SealedStore
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.launch_spec import LaunchSpec
from tests.conftest import wait_until
from tests.ports import own_port

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec
    from tests.conftest import Arena, Launch

SECRET = os.environ["DLAC_RENDEZVOUS_KEY"]
"""Secret of the nodes of all tests."""


@contextmanager
def rounds(count: int, *, timeout_s: int = 60) -> Iterator[list[Round]]:
    """Yield one round of `count` nodes with a rank each, in the view of each node by its place, through a real store.

    A node to be lost needs a short `timeout_s`. This process may be without a processor for seconds.
    """
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    launch = LaunchSpec(script="x", nodes=str(count), rendezvous="127.0.0.1:1", node_timeout_s=timeout_s, last_call_s=1)
    beats: list[NodeHeartbeat] = []
    with ExitStack() as stack:
        for place in range(count):
            beats.append(heartbeat(server.port, launch, batch_size=count))
            stack.callback(beats[-1].close, leaves=False)
            beats[-1].seek(Offer(host=f"host-{place}", address="127.0.0.1", ranks=1))
            if not place:
                wait_until(lambda: beats[0].leads, what="the first node's lease")
            wait_until(lambda: beats[-1].slot > 0, what="a slot")
        wait_until(lambda: all(beat.plan is not None for beat in beats), what="the round")
        yield [stack.enter_context(closing(round_of(beat))) for beat in beats]


def heartbeat(port: int, launch: LaunchSpec, *, batch_size: int = 2, secret: str = SECRET) -> NodeHeartbeat:
    """Start a node's heartbeat at a store on this node."""
    store = SealedStore(TCPStore("127.0.0.1", port, None, False, wait_for_workers=False), secret, "dlac/r")
    return NodeHeartbeat(store, launch, batch_size=batch_size, ended_before=None)


def round_of(beat: NodeHeartbeat) -> Round:
    """Return the round that a node is a member of."""
    plan = beat.plan
    assert plan is not None
    place = beat.place
    assert place is not None
    return Round(plan.share(place), plan=plan, heartbeat=beat)


def silence(node: Round) -> None:
    """Stop a node's heartbeat, as SIGKILL does."""
    assert node._heartbeat is not None
    node._heartbeat.close(leaves=False)


def job(campaign: Arena, run: str, **changes: Any) -> JobSpec:
    """Return a job for up to two nodes under a name."""
    meets = {"nodes": "1:2", "nproc_per_node": 1, "rendezvous": f"127.0.0.1:{own_port()}", "gather_timeout_s": 60}
    settings = {"last_call_s": 1, "node_timeout_s": 6, "noise": 0, "passes": 1, "pause_s": 0.15}
    return campaign.spec(run, **{**meets, **settings, **changes})


def leader_of(launches: list[Launch]) -> Launch:
    """Return the launch that claimed, among launches that train together."""
    leaders = [launch for launch in launches if launch.of("attempt") and "leader" not in launch.of("attempt")[-1]]
    assert len(leaders) == 1
    return leaders[0]


def train_together(campaign: Arena, spec: JobSpec, nodes: int = 2) -> list[Launch]:
    """Start `nodes` launches of one job, wait for a common checkpoint, and return them with the leader first."""
    launches = [campaign.launch(spec) for _ in range(nodes)]
    wait_for_checkpoint(campaign, spec.run, nodes)
    leader = leader_of(launches)
    return [leader, *(launch for launch in launches if launch is not leader)]


def wait_for_checkpoint(campaign: Arena, run: str, world_size: int) -> None:
    """Wait for a checkpoint of `world_size` ranks. The first node may have started alone."""
    wait_until(
        lambda: any(row.world_size == world_size for row in campaign.rows(run, CheckpointRow)),
        what=f"a checkpoint of {world_size} ranks",
    )


def wait_for_spare(spec: JobSpec, ledger: str) -> None:
    """Wait until a spare node waits while others train, by the lease of the leading node."""
    host, _, port = spec.launch.rendezvous.rpartition(":")
    store = TCPStore(host, int(port), None, False, wait_for_workers=False)
    sealed = SealedStore(store, SECRET, f"dlac/{spec.run}@{ledger}")

    def waits() -> bool:
        lease = sealed.read("lease").message
        if lease is None or lease["slots"] <= spec.launch.max_nodes:
            return False  # the lease with which a round is formed counts its members as ready
        return bool(lease["training"] and lease["ready"] > 0)

    wait_until(waits, what="a spare at the rendezvous")


def check_exact(campaign: Arena, run: str, world_sizes: list[int], **changes: Any) -> None:
    """Check that batches equal an undisturbed run's, losses differ by rounding only, and each row is consumed once.

    `world_sizes` are the run's last ones. `changes` are changes of its job that the undisturbed run needs too.
    """
    if campaign.head("alone") is None:
        alone = campaign.launch(job(campaign, "alone", nodes="", world_size=1, pause_s=0, **changes))
        assert alone.wait() == 0, alone.stderr
    sizes = [row.world_size for row in campaign.lineage(run)]
    distinct = [size for at, size in enumerate(sizes) if at == 0 or sizes[at - 1] != size]
    assert distinct[-len(world_sizes) :] == world_sizes
    assert campaign.journal(run) == campaign.journal("alone")
    assert sorted(chain(*campaign.recorded(run).values())) == sorted(chain(*campaign.journal(run).values()))
    assert campaign.losses(run) == pytest.approx(campaign.losses("alone"), rel=1e-5)
    assert audit_run(campaign.lakehouse, run).exact
