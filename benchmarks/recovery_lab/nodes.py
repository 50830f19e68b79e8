"""Runs of nodes that keep states in memory for each other, for benchmarks/memory_recovery.py. Ranks and nodes are killed."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import Figure
from benchmarks.recovery_lab.stamps import Stamp, StampFile, count_repeated
from benchmarks.recovery_lab.training import PROGRAMS, fill_source
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.conftest import wait_until
from tests.network_namespaces import NetworkNode
from tests.node_network import Network, open_network

KINDS = ("rank", "all ranks of a node", "node")
_NODES, _RANKS = 2, 4
_BATCH = 48
"""Batch size that three and four ranks divide."""
_NODE_TIMEOUT_S = 3
_KILLS_PER_FREE = 5
"""Kills of the run that waits for copies, for each kill of the one that does not."""


def measure_nodes(kills: int, pairs: int) -> dict[str, Figure]:
    """Kill by turns a rank, all ranks of a node, and a node. Then lose nodes with their buddies, in another run."""
    with open_source_network() as network:
        free = NodesRun(network, "free", nodes=_NODES, ranks=_RANKS // _NODES, spares=1)
        figures = _kill(free, max(len(KINDS), kills // _KILLS_PER_FREE))
        measured = {name.replace("nodes_", "free_", 1): each for name, each in figures.items()}
        waiting = NodesRun(network, "killed", nodes=_NODES, ranks=_RANKS // _NODES, spares=1, waits_for_copies=True)
        return measured | _kill(waiting, kills) | _lose_together(network, pairs)


@contextmanager
def open_source_network() -> Iterator[Network]:
    """Yield a network whose lakehouse has the training table."""
    with (
        tempfile.TemporaryDirectory(prefix="dlac-nodes-") as folder,
        pytest.MonkeyPatch.context() as patch,
        open_network(Path(folder), patch) as network,
    ):
        fill_source(network.arena.lakehouse)
        yield network


def _kill(run: NodesRun, kills: int) -> dict[str, Figure]:
    chance, arena = random.Random(7), run.network.arena
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    run.wait_for_steps(6)
    for number in range(kills):
        time.sleep(chance.uniform(0.0, 0.5))
        kind = KINDS[number % len(KINDS)]
        victim = chance.choice(run.training())
        found[kind].append(run.kill(kind, victim))
        run.wait_for_steps(4)
    run.stop()
    print(json.dumps({"recovery_s": found}), flush=True)
    claims = [row for row in arena.rows(run.name, ClaimRow) if row.replaces]
    losses = arena.losses(run.name)
    calm = run.calm_losses(len(losses))
    repeated = run.repeated_steps()
    figures = {
        f"nodes_{kind.replace(' ', '_')}_recovery_s": Figure(value=statistics.median(seconds), unit="s")
        for kind, seconds in found.items()
        if seconds
    }
    figures |= {
        f"nodes_{kind.replace(' ', '_')}_recovery_most_s": Figure(value=max(seconds), unit="s")
        for kind, seconds in found.items()
        if seconds
    }
    return figures | {
        "nodes_kills": Figure(value=kills, unit="kills"),
        "nodes_claims": Figure(value=len(claims), unit="recoveries", bar=f">= {kills}"),
        "nodes_from_store": Figure(value=sum(row.memory_of == 0 for row in claims), unit="recoveries", bar="<= 0"),
        "nodes_replayed": Figure(value=max(repeated), unit="batches", bar="<= 2" if run.waits_for_copies else None),
        "nodes_replayed_mean": Figure(value=statistics.mean(repeated), unit="batches"),
        "nodes_losses_differing": Figure(
            value=sum(one != other for one, other in zip(losses, calm, strict=True)), unit="steps", bar="<= 0"
        ),
        "nodes_losses_compared": Figure(value=len(losses), unit="steps"),
        "nodes_exact": Figure(value=audit_run(arena.lakehouse, run.name).exact, unit="of 1", bar=">= 1"),
        "nodes_step_s": Figure(value=run.median_step_s(), unit="s"),
    }


def _lose_together(network: Network, pairs: int) -> dict[str, Figure]:
    run = NodesRun(network, "together", nodes=3, ranks=1, spares=2, keeps_checkpoints=True)
    for _ in range(pairs):
        run.wait_for_checkpoint()
        run.wait_for_steps(3)
        run.kill("node", *[node for node in run.training() if node is not run.leader()])
    run.stop()
    claims = [row for row in network.arena.rows("together", ClaimRow) if row.replaces]
    return {
        "pairs_lost": Figure(value=pairs, unit="losses of a node and its buddy"),
        "pairs_from_store": Figure(
            value=sum(row.memory_of == 0 for row in claims), unit="recoveries", bar=f">= {pairs}"
        ),
        "pairs_exact": Figure(value=audit_run(network.arena.lakehouse, "together").exact, unit="of 1", bar=">= 1"),
    }


@dataclass
class NodesRun:
    """One run on nodes of a network, with spares that wait."""

    network: Network
    name: str
    nodes: int
    ranks: int
    """Ranks of each node."""
    spares: int
    keeps_checkpoints: bool = False
    """False: the files of each checkpoint are destroyed once it is committed, so that a recovery that read one would fail."""
    keeps_states: bool = True
    """True: nodes keep states in memory for each other, one per step if the copies are fast enough."""
    waits_for_copies: bool = False
    """True: the ranks wait for the copies, so that each step has a state."""
    large: bool = False
    """True: a model of 101 M parameters, states as often as DLAC chooses, and no checkpoint before the end."""
    joined: list[NetworkNode] = field(default_factory=list)
    """All nodes that ever took part or waited."""
    destroyed: set[Path] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.network.launches.clear()
        self.stamps = self.network.arena.home / f"{self.name}.stamps"
        self.stamp_file = StampFile(self.stamps)
        self.spec = self._spec(self.name, {})
        self._numbers = itertools.count(1)
        for _ in range(self.nodes + self.spares):
            self._join()

    def _spec(self, name: str, order: dict[str, Any]) -> JobSpec:
        size = {"hidden": "4096", "layers": "6"} if self.large else {"hidden": "1024", "layers": "1"}
        raw = {
            "run": name,
            "source": {"table": "src.rows", "columns": ["x"], "passes": 1_000},
            "order": {"batch_size": _BATCH, "key_groups": _BATCH, **order},
            "checkpoint": {
                "every_s": 3600 if self.large else 10,
                "keep_last": 2,
                "mode": "asynchronous",
                **(
                    {"memory_every_steps": int(not self.large), "memory_waits": self.waits_for_copies}
                    if self.keeps_states
                    else {"memory": ""}
                ),
            },
            "launch": {
                "script": str(PROGRAMS / "memory_rank.py"),
                "nodes": str(self.nodes),
                "nproc_per_node": self.ranks,
                "rendezvous": self.network.rendezvous,
                "node_timeout_s": _NODE_TIMEOUT_S,
                "last_call_s": 1,
                "gather_timeout_s": 120,
                "preload": ["dlac_pipeline.extensions.sharded.distributed_state", "torch.distributed.fsdp"],
            },
            "params": {"stamps": str(self.stamps), **size, "sharded": "False"},
        }
        spec = parse_spec(raw, origin="the benchmark").resolved(self.network.arena.home)
        return spec.model_copy(update={"lakehouse": self.network.catalog})

    def _join(self) -> None:
        self.joined.append(self.network.join(f"dlac-{self.name[0]}{next(self._numbers)}", self.spec))

    def training(self) -> list[NetworkNode]:
        """Return the nodes of the last attempt, once all of them have reported it."""
        found: list[NetworkNode] = []

        def is_known() -> bool:
            last = {node: each.of("attempt")[-1] for node, each in self.network.launches.items() if each.of("attempt")}
            newest = max((event["attempt"] for event in last.values()), default=0)
            found[:] = [node for node, event in last.items() if event["attempt"] == newest]
            return len(found) == self.nodes

        wait_until(is_known, what="nodes that train")
        return found

    def leader(self) -> NetworkNode:
        """Return the node that leads the last attempt."""
        return next(node for node in self.training() if "leader" not in self.network.launches[node].of("attempt")[-1])

    def kill(self, kind: str, *nodes: NetworkNode) -> float:
        """Kill a rank, all ranks of a node, or nodes. Return the seconds to the first step that is new."""
        pids = [pid for node in nodes for pid in self.network.launches[node].of("attempt")[-1]["pids"]]
        # not while the recovery is measured: the look takes longer with each attempt
        self.destroy_checkpoints()
        stamps = self.read_stamps()
        reached, before = max(each.step for each in stamps), stamps[-1].pid
        killed_at = time.time()
        for pid in () if kind == "node" else random.sample(pids, 1) if kind == "rank" else pids:
            os.kill(pid, signal.SIGKILL)
        for node in nodes if kind == "node" else ():
            self.network.lose(node)
            self._join()
        while True:
            later = self.read_stamps(after=len(stamps))
            new = [each.done for each in later if each.pid != before and each.step > reached]
            if new:
                return new[0] - killed_at
            time.sleep(0.01)

    def read_stamps(self, *, after: int = 0) -> list[Stamp]:
        """Return the stamps of all finished steps, without the first `after` ones."""
        return self.stamp_file.read(after=after)

    def wait_for_steps(self, count: int) -> None:
        """Wait for further steps."""
        before = len(self.read_stamps())
        wait_until(
            lambda: self.destroy_checkpoints() or len(self.read_stamps(after=before)) >= count, what="further steps"
        )

    def wait_for_checkpoint(self) -> None:
        """Wait for another checkpoint."""
        before = len(self.network.arena.rows(self.name, CheckpointRow))
        wait_until(lambda: len(self.network.arena.rows(self.name, CheckpointRow)) > before, what="a checkpoint")

    def destroy_checkpoints(self) -> bool:
        """Truncate the files of committed checkpoints. Return False."""
        folder = self.network.arena.home / "checkpoints" / self.name
        with suppress(FileNotFoundError):  # the run removes old ones just now
            for each in () if self.keeps_checkpoints else folder.glob("attempt-*/step-*/manifest.json"):
                if each not in self.destroyed:
                    self.destroyed.add(each)
                    for path in each.parent.glob("*.pt"):
                        os.truncate(path, 0)
        return False

    def repeated_steps(self) -> list[int]:
        """Return the number of batches that rank 0 had worked on and repeated, at each recovery, and the one in hand."""
        return [steps + 1 for steps in count_repeated(self.read_stamps())]

    def median_step_s(self) -> float:
        """Return the median time of a step."""
        pairs = itertools.pairwise(self.read_stamps())
        return statistics.median(other.done - one.done for one, other in pairs if one.pid == other.pid)

    def stop(self) -> None:
        """Stop the run after a checkpoint, as a person does, and wait for the end of its nodes. Spares are killed."""
        training, leader = self.training(), self.leader()
        for spare in [node for node in self.network.launches if node not in training]:
            self.network.lose(spare)
        self.network.launches[leader].process.send_signal(signal.SIGTERM)
        self.network.check_finished(within_s=240)

    def calm_losses(self, steps: int) -> list[float]:
        """Return the losses of a run on one node without kills and without states in memory."""
        spec, name = self._spec(f"{self.name}-calm", {"steps": steps}), f"{self.name}-calm"
        alone = {"nodes": "", "rendezvous": "", "nproc_per_node": 0, "world_size": self.nodes * self.ranks}
        spec = spec.model_copy(
            update={
                "launch": spec.launch.model_copy(update=alone),
                "checkpoint": spec.checkpoint.model_copy(update={"memory": ""}),
                "lakehouse": self.network.arena.config,
                "params": {**spec.params, "stamps": str(self.stamps.with_suffix(".calm"))},
            }
        )
        launch = self.network.arena.launch(spec)
        if launch.wait() != 0:
            raise RuntimeError(f"expected the undisturbed run to finish, found {launch.stderr[-2000:]}")
        return self.network.arena.losses(name)
