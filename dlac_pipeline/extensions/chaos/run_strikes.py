"""The strikes of `dlac chaos` on one run: each finds its target among the run's processes and files."""

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from dlac_pipeline.checkpoint.store import folder_name_of
from dlac_pipeline.extensions.chaos.chaos_job import ChaosJob
from dlac_pipeline.extensions.chaos.ending_signals import signals_held
from dlac_pipeline.extensions.chaos.faults import PlannedFault
from dlac_pipeline.extensions.chaos.strikes import Struck, damage_file, kill_tree, send_signal, struck_now, suspend
from dlac_pipeline.extensions.chaos.supervised_nodes import SupervisedNodes
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.run_rows import checkpoint_rows, lineage_of, out_of
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, QuarantinedCheckpointRow, RetireRow

LOOKS_EVERY_S = 1.0
"""Seconds between two reads of the ledger."""
_LEAST_CHECKPOINTS = 2
"""A parent to resume from remains if the newest checkpoint is damaged."""


class RunStrikes:
    """Strikes on one run."""

    def __init__(
        self,
        job: ChaosJob,
        nodes: SupervisedNodes,
        ledger: Ledger,
        *,
        away_s: float,
        tend: Callable[[], None],
        say: Callable[[str], None],
    ) -> None:
        """`ledger` is connected without a proxy. `tend` is called during an outage of `away_s` seconds. `say` shows a line."""
        self._job, self._nodes, self._ledger = job, nodes, ledger
        self._away_s, self._tend, self._say = away_s, tend, say
        self._looks_at = 0.0

    def strike(self, planned: PlannedFault, chance: random.Random) -> Struck | None:
        """Strike, or return None if there is no target now."""
        strikes: dict[str, Callable[[PlannedFault, random.Random], Struck | None]] = {
            "rank": self._strike_rank,
            "hang": self._strike_rank,
            "ranks": self._kill_ranks,
            "node": self._strike_node,
            "supervisor": self._strike_node,
            "preempt": self._strike_node,
            "checkpoint": self._damage_checkpoint,
        }
        return strikes.get(planned.kind, self._take_away)(planned, chance)

    def _strike_rank(self, planned: PlannedFault, chance: random.Random) -> Struck | None:
        ranks, number = self._nodes.ranks(), signal.SIGSTOP if planned.kind == "hang" else signal.SIGKILL
        rank = planned.rank if planned.rank is not None or not ranks else chance.choice(list(ranks))
        if rank not in ranks:
            return None
        return struck_now(f"{number.name} to rank {rank}", send_signal([ranks[rank]], number), ranks[rank])

    def _kill_ranks(self, planned: PlannedFault, chance: random.Random) -> Struck | None:
        ranks = self._nodes.ranks()
        if not ranks:
            return None
        return struck_now("SIGKILL to all ranks", send_signal(ranks.values(), signal.SIGKILL), *ranks.values())

    def _strike_node(self, planned: PlannedFault, chance: random.Random) -> Struck | None:
        nodes = [number for number, node in self._nodes.running.items() if node.ranks()]
        if not nodes:
            return None
        number, has_others = chance.choice(nodes), self._job.spec.launch.max_nodes > 1
        node = self._nodes.running[number]
        ranks, supervisor = list(node.ranks().values()), node.supervisor
        name = f"supervisor of node {number}" if has_others else "supervisor"
        if planned.kind == "node":
            at = time.time()
            psutil.wait_procs(kill_tree(supervisor), timeout=10)  # they write into the memory
            self._job.forget_memory(number)
            return struck_now(f"SIGKILL to the {name} and its ranks", at, supervisor, *ranks)
        if planned.kind == "supervisor":
            return struck_now(f"SIGKILL to the {name}", self._nodes.kill_supervisor(number), supervisor, *ranks)
        if has_others:  # SIGTERM to its supervisor would stop the run on all nodes
            at = send_signal(ranks[:1], signal.SIGUSR1)
            return struck_now(f"SIGUSR1 to a rank of node {number}", at, supervisor, *ranks)
        return struck_now(f"SIGTERM to the {name}", send_signal([supervisor], signal.SIGTERM), supervisor, *ranks)

    def _damage_checkpoint(self, planned: PlannedFault, chance: random.Random) -> Struck | None:
        """Damage the head while the supervisors are stopped, so that they resume from damage."""
        ranks = list(self._nodes.ranks().values())
        if not ranks or time.monotonic() < self._looks_at:
            return None
        self._looks_at = time.monotonic() + LOOKS_EVERY_S
        if len(self._restorable()) < _LEAST_CHECKPOINTS:
            return None
        with signals_held(), suspend([node.supervisor for node in self._nodes.running.values()]):
            at = send_signal(ranks, signal.SIGKILL)
            psutil.wait_procs(ranks, timeout=10)
            for number in self._nodes.running:
                self._job.forget_memory(number)  # or no checkpoint would be read
            head = self._restorable()[0]
            spec = self._job.spec
            folder = Path(spec.checkpoint.local) / spec.run / folder_name_of(head.manifest_uri)
            what = damage_file(folder, chance)
        return struck_now(f"{what} of step {head.step}, SIGKILL to all ranks", at, *ranks)

    def has_committed_since(self, moment: float) -> bool:
        """Return whether the run has committed a checkpoint after a moment."""
        rows = self._ledger.rows(self._job.spec.run, kinds=(CheckpointRow,))
        return any(row.committed_at.timestamp() > moment for row in rows)

    def _restorable(self) -> list[CheckpointRow]:
        """Return the checkpoints of the lineage that can be restored, the newest first."""
        run = self._job.spec.run
        head = self._ledger.state(run).fence.head  # before the rows: the run continues
        rows = self._ledger.rows(run, kinds=(CheckpointRow, RetireRow, QuarantinedCheckpointRow))
        checkpoints, out = checkpoint_rows(rows), out_of(rows)
        return [checkpoints[name] for name in lineage_of(rows, head) if name not in out]

    def _take_away(self, planned: PlannedFault, chance: random.Random) -> Struck | None:
        if not self._job.has_target(planned.kind):
            return None
        at = time.time()
        with signals_held() as received, self._job.outage(planned.kind, chance) as what:
            if command := self._job.way_back(planned.kind):
                self._say(f"{what} for {self._away_s:g} s. Only if this command is killed meanwhile: {command}")
            while time.time() < at + self._away_s and not received:
                self._tend()
        lifted_at = time.time()
        self._tend()  # a launch folder in the store was unavailable until now
        return Struck(what=f"{what} for {self._away_s:g} s", at=at, lifted_at=lifted_at)
