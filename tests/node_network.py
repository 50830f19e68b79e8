"""Nodes on their own network with a PostgreSQL catalog and a rendezvous on it, and a shared folder as checkpoint store."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.lakehouse.config import LakehouseConfig
from tests.conftest import Arena
from tests.launched_nodes import job, leader_of
from tests.network_namespaces import SWITCH, NetworkNode, network_node, open_switch
from tests.postgres_server import postgres

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec
    from tests.conftest import Launch

BATCH = 24
"""Batch size that three, two and one ranks divide."""


@dataclass
class Network:
    """A lakehouse on a network, and nodes that train a run."""

    arena: Arena
    address: str
    catalog: LakehouseConfig
    """The lakehouse as the nodes reach it."""
    rendezvous: str
    stack: ExitStack
    launches: dict[NetworkNode, Launch] = field(default_factory=dict)

    def job(self, run: str, nodes: str, **changes: Any) -> JobSpec:
        """Return a job for a range of nodes."""
        meets = {"nodes": nodes, "rendezvous": self.rendezvous, "batch_size": BATCH, "gather_timeout_s": 120}
        return job(self.arena, run, **meets, **changes).model_copy(update={"lakehouse": self.catalog})

    def join(self, name: str, spec: JobSpec) -> NetworkNode:
        """Start a new node that takes part."""
        made = self.stack.enter_context(network_node(name))
        self.launches[made] = self.arena.launch(spec, under=made.command)
        return made

    def lose(self, lost: NetworkNode) -> None:
        """Kill a node, with its network, at once."""
        lost.unplug()
        self.launches.pop(lost).destroy()

    def leader(self) -> NetworkNode:
        """Return the leading node."""
        leader = leader_of(list(self.launches.values()))
        return next(each for each, launch in self.launches.items() if launch is leader)

    def check_finished(self, *, within_s: float = 150.0) -> None:
        """Check that all remaining nodes succeed."""
        deadline = time.monotonic() + within_s
        for each, launch in self.launches.items():
            code = launch.process.wait(timeout=max(1.0, deadline - time.monotonic()))
            assert code == 0, (each.name, launch.events[-3:], launch.stderr[-2000:])


@contextmanager
def serve_rendezvous(address: str) -> Iterator[None]:
    """Run `dlac rendezvous`, next to the catalog."""
    command = ["ip", "netns", "exec", SWITCH, sys.executable, "-m", "dlac_pipeline.cli.main", "rendezvous", address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            assert "serving" in server.stdout.readline()
            yield
        finally:
            server.send_signal(signal.SIGTERM)
            assert server.wait(timeout=60) == 0


@contextmanager
def open_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Yield a switch with a lakehouse, which has no table yet."""
    home = folder / "home"
    home.mkdir()
    with ExitStack() as stack:
        address = stack.enter_context(open_switch())
        uri = stack.enter_context(postgres(listens=address, under=["ip", "netns", "exec", SWITCH]))
        config_here = LakehouseConfig(uri=uri).at_home(home)
        config_there = config_here.model_copy(update={"uri": f"postgresql+psycopg2://dagster@{address}/postgres"})
        meets = f"{address}:{free_port()}"
        stack.enter_context(serve_rendezvous(meets))
        arena = Arena(home, monkeypatch, config_here)
        stack.callback(arena.close)
        yield Network(arena, address, config_there, meets, stack)
