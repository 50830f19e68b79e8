"""Nodes on a network of their own, with a lakehouse: what tests and the soak of several nodes share.

The catalog is a PostgreSQL server on the network, with the rendezvous beside it. The checkpoint store is a shared folder.
"""

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
from tests.crews import job, leader_of
from tests.hosts import SWITCH_HOST, Host, host, switched
from tests.postgres_server import postgres

if TYPE_CHECKING:
    from dlac_pipeline.spec.job_spec import JobSpec
    from tests.conftest import Launch

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

    def job(self, run: str, nodes: str, **changes: Any) -> JobSpec:
        """A job for so many machines."""
        meets = {"nodes": nodes, "rendezvous": self.rendezvous, "batch_size": BATCH, "gather_timeout_s": 120}
        spec = job(self.arena, run, **meets, **changes)
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
            assert server.wait(timeout=60) == 0


@contextmanager
def open_network(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    """Yield a switch with a lakehouse, which has no table yet."""
    home = folder / "home"
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
        yield Network(arena, address, there, meets, stack)
