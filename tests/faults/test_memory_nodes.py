"""Nodes, which are processes here, keep states in memory for each other: a lost one costs two batches and no checkpoint."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.memory_states.states import copied_step, memory_folder, read_states
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import Arena, Launch, wait_until
from tests.launched_nodes import job, leader_of


@dataclass
class Nodes:
    """Nodes that train a run together, each with separate memory."""

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

    def leader(self) -> str:
        """Return the node that leads."""
        leads = leader_of(list(self.launches.values()))
        return next(name for name, launch in self.launches.items() if launch is leads)

    def place(self, name: str) -> int:
        """Return the place of a node with one rank that follows."""
        return int(self.launches[name].of("attempt")[-1]["ranks"][0])

    def wait_for_states(self, step: int) -> None:
        """Wait until all nodes train together, and each has kept and copied a state of this step or a later one."""

        def has_copied() -> bool:
            folders = [folder for name in self.launches if (folder := memory_folder(self.spec_of(name)))]
            newest = [max(each.glob("*/"), default=each) for each in folders]
            copied = [max(copied_step(each, rank) for rank in range(8)) for each in newest]
            return min(copied) >= step and len({each.name for each in newest}) == 1

        wait_until(lambda: self.train_together() and has_copied(), what="copies of all nodes")

    def train_together(self) -> bool:
        """Return whether all nodes train in one attempt."""
        last = [each.of("attempt")[-1] for each in self.launches.values() if each.of("attempt")]
        sizes = {each["world_size"] for each in last if "world_size" in each}
        return len(last) == len(self.launches) and sizes == {len(last) * self.spec.launch.nproc_per_node}

    def wait_for_copies(self, step: int = 1) -> None:
        """Wait until each of two nodes has a whole state of this step or a later one."""
        for name in self.launches:
            wait_until(lambda name=name: max(self.steps(name), default=0) >= step, what="a copied state")  # type: ignore[misc]

    def claims(self) -> list[int]:
        """Return the attempt whose memory state each attempt took."""
        return [row.memory_of for row in self.arena.rows(self.spec.run, ClaimRow)]

    def destroy_checkpoints(self) -> None:
        """Destroy the files of all checkpoints: nothing reads them."""
        for path in (self.arena.home / "checkpoints" / self.spec.run).glob("attempt-*/step-*/*.pt"):
            path.write_bytes(b"destroyed")

    def check_finished(self, *, rounding: float = 0.0) -> None:
        """Check that the run ended exactly as an undisturbed run on one node, and left nothing in memory.

        `rounding` is the greatest ratio of losses, which other numbers of ranks round differently.
        """
        for launch in self.launches.values():
            assert launch.wait() == 0, (launch.events[-5:], launch.stderr)
        run, arena = self.spec.run, self.arena
        (last,) = arena.lineage(run)[-1:]
        chosen = f"{self.spec.params.get('stage', '')}-{last.world_size}-{self.spec.order.steps}"
        calm = f"calm-{Path(self.spec.launch.script).stem}-{chosen}"
        if arena.head(calm) is None:
            alone = arena.launch(spec_of(arena, calm, self.spec, last.world_size))
            assert alone.wait() == 0, alone.stderr
        assert arena.journal(run) == arena.journal(calm)
        losses = arena.losses(calm)
        assert arena.losses(run) == (pytest.approx(losses, rel=rounding) if rounding else losses)
        assert audit_run(arena.lakehouse, run).exact
        assert not [path for path in self.home.rglob("*") if path.is_file()]

    def check_replayed(self) -> None:
        """Check that no recovery repeated more than two batches."""
        found = [event["rows_replayed"] for each in self.launches.values() for event in each.of("recovered")]
        assert max(found) <= 2 * self.spec.order.batch_size


def spec_of(arena: Arena, run: str, spec: JobSpec, world_size: int) -> JobSpec:
    """Return the same job for one node without memory states."""
    launch = spec.launch.model_copy(update={"nodes": "", "world_size": world_size, "rendezvous": ""})
    checkpoint = spec.checkpoint.model_copy(update={"memory": ""})
    params = {**spec.params, "run": run, "pause_s": "0"}
    return spec.model_copy(update={"run": run, "launch": launch, "checkpoint": checkpoint, "params": params})


@pytest.fixture
def nodes(campaign: Arena) -> Iterator[Callable[..., Nodes]]:
    """Yield a function that makes a run of nodes without any node yet."""
    with tempfile.TemporaryDirectory(prefix="dlac-nodes-", dir="/dev/shm") as home:

        def make(run: str, program: str = "train_tiny.py", **changes: Any) -> Nodes:
            states = {"nodes": "2", "node_timeout_s": 3, "memory": home, "memory_every_steps": 1, "every_steps": 25}
            training = {"batch_size": 24, "passes": 2, "steps": 60, "pause_s": 0.05, "program": program}
            return Nodes(campaign, job(campaign, run, **{**states, **training, **changes}), Path(home))

        yield make
        campaign.close()


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{}, pytest.param({"mesh": {"tp": 2}, "nproc_per_node": 2}, marks=pytest.mark.soak)])
def test_lost_node_costs_two_batches(nodes: Callable[..., Nodes], mesh: dict[str, Any]) -> None:
    """A node is lost with its memory, and replaced by one with empty memory. The checkpoint's files are destroyed."""
    run = nodes(f"memory-nodes-{len(mesh)}", memory_waits=True, **mesh)
    run.start("a", "b")
    wait_until(lambda: bool(run.arena.rows(run.spec.run, CheckpointRow)), what="a checkpoint")
    run.destroy_checkpoints()
    run.wait_for_copies(27)
    run.lose("b")
    run.start("c")
    run.check_finished()
    assert run.claims() == [0, 1]
    run.check_replayed()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("program", "changes"),
    [
        ("train_tiny.py", {}),
        ("train_fsdp2.py", {"dropout": 0}),
        *(("train_deepspeed.py", {"stage": stage, "dropout": 0}) for stage in "123"),
    ],
    ids=["torch", "fsdp2", "zero1", "zero2", "zero3"],
)
def test_smaller_world_resumes_from_memory(nodes: Callable[..., Nodes], program: str, changes: dict[str, Any]) -> None:
    """One of three nodes is lost. The other two have all parts of the state between them, and convert it."""
    more = {"env": {"DS_ACCELERATOR": "cpu"}, "preload": ["deepspeed"]} if "deepspeed" in program else {}
    run = nodes(f"memory-smaller-{program[6:-3]}-{changes.get('stage', '')}", program, nodes="2:3", **more, **changes)
    run.start("a", "b", "c")
    run.wait_for_states(3)
    run.lose(next(name for name in run.launches if name != run.leader()))
    run.check_finished(rounding=1e-4)
    assert run.claims()[-1] > 0
    assert [row.world_size for row in run.arena.lineage(run.spec.run)][-1] == 2


@pytest.mark.soak
@pytest.mark.parametrize("who", ["next", "other"])
def test_lost_buddy_reads_store(nodes: Callable[..., Nodes], who: str) -> None:
    """A node and its buddy are lost together: the checkpoint is read, also if any two of three nodes are lost."""
    run = nodes(f"memory-buddies-{who}", nodes="3")
    run.start("a", "b", "c")
    run.wait_for_states(27)
    followers = sorted((name for name in run.launches if name != run.leader()), key=run.place)
    for name in followers if who == "next" else (run.leader(), followers[1]):
        run.lose(name)
    run.start("d", "e")
    run.check_finished()
    assert [claim for claim in run.claims() if claim] == []
