"""Nodes on a network that is cut: the nodes that reach each other resume, and an isolated node never commits.

The catalog is a PostgreSQL server on the network, and so is the rendezvous. The checkpoint store is a shared folder that
stays available, like a separate storage network. An isolated node could write to it, but must not commit a checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dlac_pipeline.lakehouse.errors import NodesMissing
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.conftest import wait_until
from tests.launched_nodes import check_exact, wait_for_checkpoint
from tests.node_network import BATCH, Network, open_network
from tests.postgres_server import needs_postgres

pytestmark = [pytest.mark.soak, *needs_postgres]


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """A network with a lakehouse."""
    with open_network(tmp_path_factory.mktemp("hosts"), monkeypatch) as opened:
        opened.arena.table()
        yield opened


@pytest.mark.parametrize("who", ["the leader", "another one"])
def test_lost_node_is_replaced(network: Network, who: str) -> None:
    """Three nodes train, then two, then three again."""
    spec = network.job("lost-for-good", "2:3", pause_s=0.4)  # the newcomer comes in time, also on a busy node
    for name in ("a", "b", "c"):
        network.join(f"dlac-{name}", spec)
    wait_for_checkpoint(network.arena, spec.run, 3)
    leader = network.leader()
    network.lose(leader if who == "the leader" else next(each for each in network.launches if each is not leader))
    wait_for_checkpoint(network.arena, spec.run, 2)
    network.join("dlac-d", spec)
    network.check_finished()
    check_exact(network.arena, spec.run, [3, 2, 3], batch_size=BATCH)


@pytest.mark.parametrize("who", ["the leader", "another one"])
def test_isolated_node_rejoins(network: Network, who: str) -> None:
    """An unplugged node commits nothing and ends its ranks, and its peers resume. Plugged in again, it rejoins."""
    spec = network.job("away", "2:3")
    for name in ("a", "b", "c"):
        network.join(f"dlac-{name}", spec)
    wait_for_checkpoint(network.arena, spec.run, 3)
    leader = network.leader()
    isolated = leader if who == "the leader" else next(each for each in network.launches if each is not leader)
    isolated.unplug()
    wait_for_checkpoint(network.arena, spec.run, 2)
    wait_until(lambda: network.launches[isolated].ranks() == [], what="the end of the isolated node's ranks")
    isolated.plug()
    network.check_finished()
    check_exact(network.arena, spec.run, [3, 2, 3], batch_size=BATCH)


def test_run_waits_while_all_are_isolated(network: Network) -> None:
    """No node can resume, and nothing is committed. When the network is back, the run resumes where it was."""
    spec = network.job("all-isolated", "2:3")
    nodes = [network.join(f"dlac-{name}", spec) for name in ("a", "b")]
    wait_for_checkpoint(network.arena, spec.run, 2)
    for each in nodes:
        each.unplug()
    before = network.arena.rows(spec.run)
    time.sleep(3 * spec.launch.node_timeout_s + 5)  # each node misses the other, and could have trained alone
    assert network.arena.rows(spec.run) == before
    for each in nodes:
        each.plug()
    network.check_finished()
    check_exact(network.arena, spec.run, [2], batch_size=BATCH)


def test_single_node_is_too_few(network: Network) -> None:
    """The run needs two nodes. The remaining one waits, and ends with the number of missing nodes. The ledger is unchanged."""
    spec = network.job("too-few", "2")
    spec = spec.model_copy(update={"launch": spec.launch.model_copy(update={"gather_timeout_s": 10.0})})
    nodes = [network.join(f"dlac-{name}", spec) for name in ("a", "b")]
    wait_for_checkpoint(network.arena, spec.run, 2)
    network.lose(nodes[0])
    assert network.launches[nodes[1]].wait() == NodesMissing.exit_code
    assert {row.world_size for row in network.arena.rows(spec.run, CheckpointRow)} == {2}
