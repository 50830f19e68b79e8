"""Machines with a network of their own, which is cut: those that can still talk go on, one that cannot never commits.

The catalog is a PostgreSQL server on the network, the rendezvous is served beside it; the checkpoint store is a shared folder,
which stays (as a storage network of its own would): who is isolated could write to it, and must not make a checkpoint of that.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.lakehouse.config import LakehouseConfig
from dlac_pipeline.lakehouse.errors import NodesMissing
from tests.conftest import Arena, wait_until
from tests.crews import check_exact, job, leader_of, wait_for_checkpoint
from tests.hosts import SWITCH_HOST, Host, host, switched
from tests.postgres_server import needs_postgres, postgres

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec
    from tests.conftest import Launch

pytestmark = [pytest.mark.soak, *needs_postgres]
BATCH = 24
"""Three ranks can share it, as can two and one."""


@dataclass
class Network:
    """A lakehouse on a network, and machines there that train a run."""

    arena: Arena
    address: str
    catalog: LakehouseConfig
    """As the machines reach it."""
    rendezvous: str
    stack: ExitStack
    launches: dict[Host, Launch] = field(default_factory=dict)

    def job(self, run: str, nodes: str) -> JobSpec:
        """A job for so many machines."""
        spec = job(self.arena, run, nodes=nodes, rendezvous=self.rendezvous, batch_size=BATCH, gather_timeout_s=120)
        return spec.model_copy(update={"lakehouse": self.catalog})

    def join(self, name: str, spec: JobSpec) -> Host:
        """A new machine that takes part."""
        made = self.stack.enter_context(host(name))
        self.launches[made] = self.arena.launch(spec, under=made.command)
        return made

    def lose(self, lost: Host) -> None:
        """It is gone from one moment to the next, with its network."""
        lost.unplug()
        self.launches.pop(lost).destroy()

    def leader(self) -> Host:
        """Who leads."""
        leader = leader_of(list(self.launches.values()))
        return next(each for each, launch in self.launches.items() if launch is leader)

    def check_finished(self, *, within_s: float = 150.0) -> None:
        """All that are still there end well."""
        deadline = time.monotonic() + within_s
        for each, launch in self.launches.items():
            code = launch.process.wait(timeout=max(1.0, deadline - time.monotonic()))
            assert code == 0, (each.name, launch.events[-3:], launch.stderr[-2000:])


@contextmanager
def serving(address: str) -> Iterator[None]:
    """`dlac rendezvous`, beside the catalog."""
    command = [
        "ip",
        "netns",
        "exec",
        SWITCH_HOST,
        sys.executable,
        "-m",
        "dlac_pipeline.cli.main",
        "rendezvous",
        address,
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert "serving" in server.stdout.readline()
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=10) == 0


@pytest.fixture
def network(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """A switch with a lakehouse behind it."""
    home = tmp_path_factory.mktemp("hosts") / "home"
    home.mkdir()
    with ExitStack() as stack:
        address = stack.enter_context(switched())
        under = ["ip", "netns", "exec", SWITCH_HOST]
        uri = stack.enter_context(postgres(listens=address, under=under))
        here = LakehouseConfig(uri=uri).at_home(home)
        there = here.model_copy(update={"uri": f"postgresql+psycopg2://dagster@{address}/postgres"})
        meets = f"{address}:{free_port()}"
        stack.enter_context(serving(meets))
        arena = Arena(home, monkeypatch, here)
        stack.callback(arena.close)
        arena.table()
        yield Network(arena, address, there, meets, stack)


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
