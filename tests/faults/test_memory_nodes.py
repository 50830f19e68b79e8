"""Nodes keep states in memory for each other: a lost rank or node costs two batches, and no checkpoint is read.

All nodes are processes on this node. Each has a folder of its own in shared memory, which is removed with the node.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.checkpoint.memory.states import memory_folder, read_states
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import wait_until
from tests.ports import own_port

if TYPE_CHECKING:
    from tests.conftest import Arena, Launch

_BATCH = 32


@dataclass
class Nodes:
    """Nodes that train a run together, each with memory of its own."""

    arena: Arena
    spec: JobSpec
    home: Path
    """Folder of the memories of all nodes."""
    launches: dict[str, Launch] = field(default_factory=dict)

    def spec_of(self, name: str) -> JobSpec:
        """Return the job spec with the memory of a node."""
        checkpoint = self.spec.checkpoint.model_copy(update={"memory": str(self.home / name)})
        return self.spec.model_copy(update={"checkpoint": checkpoint})

    def start(self, *names: str) -> None:
        """Start nodes."""
        for name in names:
            (self.home / name).mkdir(exist_ok=True)
            self.launches[name] = self.arena.launch(self.spec_of(name), takeover=True)

    def lose(self, name: str) -> None:
        """Kill a node, and lose its memory."""
        self.launches.pop(name).destroy()
        shutil.rmtree(self.home / name)

    def steps(self, name: str) -> list[int]:
        """Return the steps of the whole states in the memory of one node, the newest first."""
        folder = memory_folder(self.spec_of(name))
        return [] if folder is None else [state.first.step for state in read_states(folder)]

    def wait_for_copies(self, step: int = 1) -> None:
        """Wait until each of two nodes has a whole state of this step or a later one."""
        for name in self.launches:
            wait_until(lambda name=name: max(self.steps(name), default=0) >= step, what="a copied state")  # type: ignore[misc]

    def recovered(self) -> dict[str, Any]:
        """Wait for a recovery, and return it."""
        wait_until(lambda: any(each.of("recovered") for each in self.launches.values()), what="a recovery")
        return next(each.of("recovered")[-1] for each in self.launches.values() if each.of("recovered"))

    def claims(self) -> list[int]:
        """Return the attempt whose memory state each attempt took."""
        return [row.memory_of for row in self.arena.rows(self.spec.run, ClaimRow)]

    def destroy_checkpoints(self) -> None:
        """Destroy the files of all checkpoints: nothing reads them."""
        for path in (self.arena.home / "checkpoints" / self.spec.run).glob("attempt-*/step-*/*.pt"):
            path.write_bytes(b"destroyed")

    def check_finished(self) -> None:
        """Check that the run ended exactly as the undisturbed run, and left nothing in memory."""
        for launch in self.launches.values():
            assert launch.wait() == 0, (launch.events[-5:], launch.stderr)
        run = self.spec.run
        assert self.arena.journal(run) == self.arena.journal("reference")
        assert self.arena.losses(run) == self.arena.losses("reference")
        assert audit_run(self.arena.lakehouse, run).exact
        assert not [path for path in self.home.rglob("*") if path.is_file()]


@pytest.fixture
def nodes(campaign: Arena) -> Iterator[Callable[..., Nodes]]:
    """Yield a function that makes a run of nodes without any node yet."""
    with tempfile.TemporaryDirectory(prefix="dlac-nodes-", dir="/dev/shm") as home:

        def make(run: str, **changes: Any) -> Nodes:
            chosen = {
                "nodes": "2",
                "nproc_per_node": 1,
                "rendezvous": f"127.0.0.1:{own_port()}",
                "gather_timeout_s": 60,
                "last_call_s": 1,
                "node_timeout_s": 3,
                "memory": home,
                "memory_every_steps": 1,
                "every_steps": 40,
                "pause_s": 0.05,
                **changes,
            }
            return Nodes(campaign, campaign.spec(run, **chosen), Path(home))

        yield make


def test_nodes_resume_from_memory(nodes: Callable[..., Nodes]) -> None:
    """A rank is killed, then a node is lost with its memory, and replaced by one with empty memory."""
    run = nodes("memory-nodes")
    run.start("a", "b")
    run.wait_for_copies()
    for launch in run.launches.values():
        launch.wait_for("attempt")
    os.kill(run.launches["a"].ranks()[0].pid, signal.SIGKILL)
    assert run.recovered()["rows_replayed"] <= 2 * _BATCH
    run.launches["b"].wait_for("attempt", 2)
    wait_until(lambda: bool(run.arena.rows("memory-nodes", CheckpointRow)), what="a checkpoint")
    run.destroy_checkpoints()
    run.wait_for_copies(42)
    run.lose("b")
    run.start("c")
    run.check_finished()
    assert run.claims() == [0, 1, 2]
    assert max(each["rows_replayed"] for each in run.launches["a"].of("recovered")) <= 2 * _BATCH
