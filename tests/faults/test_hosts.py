"""Machines with a network of their own, which is cut: those that can still talk go on, one that cannot never commits.

The catalog is a PostgreSQL server on the network, the rendezvous is served beside it; the checkpoint store is a shared folder,
which stays (as a storage network of its own would): who is isolated could write to it, and must not make a checkpoint of that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from dlac_pipeline.lakehouse.errors import NodesMissing
from tests.conftest import wait_until
from tests.crews import check_exact, wait_for_checkpoint
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
def test_one_node_lost_and_one_added(network: Network, who: str) -> None:
    """Three, then two, then three again."""
    spec = network.job("lost-for-good", "2:3")
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
def test_one_is_away_for_a_while(network: Network, who: str) -> None:
    """Its cable is pulled: the others go on, it commits nothing and ends its ranks; plugged in again, it takes part again."""
    spec = network.job("away", "2:3")
    for name in ("a", "b", "c"):
        network.join(f"dlac-{name}", spec)
    wait_for_checkpoint(network.arena, spec.run, 3)
    leader = network.leader()
    away = leader if who == "the leader" else next(each for each in network.launches if each is not leader)
    away.unplug()
    wait_for_checkpoint(network.arena, spec.run, 2)
    wait_until(lambda: network.launches[away].ranks() == [], what="the end of the ranks of who is isolated")
    away.plug()
    network.check_finished()
    check_exact(network.arena, spec.run, [3, 2, 3], batch_size=BATCH)


def test_all_are_isolated_from_each_other(network: Network) -> None:
    """Nobody can go on; nothing is committed meanwhile; with the network back the run goes on where it was."""
    spec = network.job("all-isolated", "2:3")
    hosts = [network.join(f"dlac-{name}", spec) for name in ("a", "b")]
    wait_for_checkpoint(network.arena, spec.run, 2)
    for each in hosts:
        each.unplug()
    before = network.arena.rows(spec.run)
    time.sleep(3 * spec.launch.node_timeout_s + 5)  # each misses the other, looks for it, and could have trained alone
    assert network.arena.rows(spec.run) == before
    for each in hosts:
        each.plug()
    network.check_finished()
    check_exact(network.arena, spec.run, [2], batch_size=BATCH)


def test_one_alone_is_too_few(network: Network) -> None:
    """With two wanted, who is left behind waits for its time, ends with what is missing, and the ledger is as it was."""
    spec = network.job("too-few", "2")
    spec = spec.model_copy(update={"launch": spec.launch.model_copy(update={"gather_timeout_s": 10.0})})
    hosts = [network.join(f"dlac-{name}", spec) for name in ("a", "b")]
    wait_for_checkpoint(network.arena, spec.run, 2)
    network.lose(hosts[0])
    assert network.launches[hosts[1]].wait() == NodesMissing.exit_code
    assert {row["world_size"] for row in network.arena.rows(spec.run, "checkpoint")} == {2}
