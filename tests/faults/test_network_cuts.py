"""Nodes on a network that is cut, with its catalog and rendezvous: an isolated node, which has the store, never commits."""

import time
from collections.abc import Iterator

import pytest

from dlac_pipeline.lakehouse.errors import NodesMissing
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from tests.conftest import wait_until
from tests.launched_nodes import check_exact, wait_for_checkpoint
from tests.network_namespaces import network_node
from tests.node_network import BATCH, Network, open_network
from tests.postgres_server import needs_postgres

pytestmark = [pytest.mark.soak, *needs_postgres]


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """A network with a lakehouse."""
    with open_network(tmp_path_factory.mktemp("hosts"), monkeypatch) as opened:
        opened.arena.table()
        yield opened


@pytest.mark.parametrize("how", ["lost", "isolated"])
@pytest.mark.parametrize("who", ["the leader", "another one"])
def test_missing_node_is_replaced(network: Network, who: str, how: str) -> None:
    """Three nodes train, then two, then three: with a new or the unplugged node, which commits nothing while isolated."""
    pause = {"pause_s": 0.4} if how == "lost" else {}  # the newcomer comes in time, also on a busy node
    spec = network.job(f"node-{how}", "2:3", **pause)
    for name in ("a", "b", "c"):
        network.join(f"dlac-{name}", spec)
    wait_for_checkpoint(network.arena, spec.run, 3)
    leader = network.leader()
    node = leader if who == "the leader" else next(each for each in network.launches if each is not leader)
    if how == "lost":
        network.lose(node)
    else:
        node.unplug()
    wait_for_checkpoint(network.arena, spec.run, 2)
    if how == "lost":
        network.join("dlac-d", spec)
    else:
        wait_until(lambda: network.launches[node].ranks() == [], what="the end of the isolated node's ranks")
        node.plug()
    network.check_finished()
    check_exact(network.arena, spec.run, [3, 2, 3], batch_size=BATCH)


def test_lost_rendezvous_moves(network: Network) -> None:
    """The node that serves the rendezvous is lost. The others meet at the second address, and finish the run."""
    nodes = [network.stack.enter_context(network_node(f"dlac-m{name}")) for name in "abc"]
    spec = network.job("moves", "2:3", pause_s=0.4)
    meets = ",".join(f"{node.address}:29400" for node in nodes[:2])
    spec = spec.model_copy(update={"launch": spec.launch.model_copy(update={"rendezvous": meets})})
    network.launches |= {node: network.arena.launch(spec, under=node.command) for node in nodes}
    wait_for_checkpoint(network.arena, spec.run, 3)
    network.lose(nodes[0])
    network.check_finished()
    check_exact(network.arena, spec.run, [3, 2], batch_size=BATCH)


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
