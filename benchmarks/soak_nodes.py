"""Faults on a run of three nodes with a network each, until all are healed: `python -m benchmarks.soak_nodes [--quick]`.

Each node is a network namespace on one switch, with a real supervisor and one rank. The catalog is a PostgreSQL server on the
switch, and so is the rendezvous. The seed draws the faults in order, all kinds equally often:

- node lost, leader lost: the node is unplugged and all its processes are killed. Two nodes train until a newcomer is drawn.
- newcomer: another node joins after a checkpoint.
- network cut: the node's cable is unplugged until the others have committed a checkpoint, then plugged in again.
- rank killed: SIGKILL of one node's rank.

A fault is healed once the nodes that remain have committed a checkpoint in a later attempt. Then the run is stopped, and has to
be exact by the audit, by the journal of the training function, and by the losses of a run of one rank without faults. It needs
root, iproute2 and PostgreSQL. 20 faults by default, `--faults` sets another number, `--quick` is 5.
"""

import argparse
import json
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import pytest

from benchmarks.figures import Figure, report
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow, ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec
from tests.conftest import wait_until
from tests.launched_nodes import job
from tests.network_namespaces import NetworkNode
from tests.node_network import BATCH, Network, open_network

_NODE, _LEADER, _NEWCOMER, _CUT, _RANK = "node lost", "leader lost", "newcomer", "network cut", "rank killed"
_NODES, _LEAST = 3, 2
_RUN = "soak-nodes"
_PASSES_PER_FAULT = 4
"""More steps than the faults need: the run is stopped after the last one."""
_LOSS_DIFFERS = 1e-5
"""Sums over other numbers of ranks are rounded differently."""
_ENDS_WITHIN_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One healed fault."""

    kind: str
    node: str
    step: int
    """Step of the head at the strike."""
    healed_s: float
    """Seconds from the strike to the first checkpoint of the remaining nodes."""


def choose(faults: int, chance: random.Random) -> list[str]:
    """Return kinds of faults in an order with at least two and at most three nodes."""
    drawn: list[str] = []
    nodes = _NODES
    for _ in range(faults):
        possible = [_RANK, *([_NODE, _LEADER, _CUT] if nodes == _NODES else [_NEWCOMER])]
        kind = min(chance.sample(possible, len(possible)), key=drawn.count)
        nodes += (kind == _NEWCOMER) - (kind in (_NODE, _LEADER))
        drawn.append(kind)
    return drawn


class Campaign:
    """One run on three nodes."""

    def __init__(self, network: Network, spec: JobSpec, chance: random.Random) -> None:
        self._network = network
        self._spec = spec
        self._chance = chance
        self._named = 0
        for _ in range(_NODES):
            self._join()

    def strike(self, kind: str) -> Fault:
        """Do one fault, and wait until it is healed."""
        leader = self._leader()
        others = [node for node in self._network.launches if node is not leader]
        node = leader if kind == _LEADER else self._chance.choice(others if kind == _NODE else [leader, *others])
        before, began = self._checkpoints()[-1], time.monotonic()
        if kind == _NEWCOMER:
            node = self._join()
        elif kind == _RANK:
            self._network.launches[node].ranks()[0].kill()
        elif kind == _CUT:
            node.unplug()
            self._wait_for_checkpoint(before, nodes=_LEAST)
            node.plug()
        else:
            self._network.lose(node)
        self._wait_for_checkpoint(before, nodes=len(self._network.launches))
        seconds = round(time.monotonic() - began, 1)
        return Fault(kind=kind, node=node.name, step=before.step, healed_s=seconds)

    def wait_for_first(self) -> None:
        """Wait for a checkpoint of all nodes."""
        nodes = len(self._network.launches)
        wait_until(lambda: any(row.world_size == nodes for row in self._checkpoints()), what="a checkpoint of all")

    def stop(self) -> None:
        """End the run after a checkpoint, as a person does."""
        self._network.launches[self._leader()].process.send_signal(signal.SIGTERM)
        self._network.check_finished(within_s=_ENDS_WITHIN_S)

    def _join(self) -> NetworkNode:
        self._named += 1
        return self._network.join(f"dlac-{self._named}", self._spec)

    def _leader(self) -> NetworkNode:
        """Return the node whose ranks train the last attempt, and that no other node leads."""
        last = {node: launch.of("attempt")[-1] for node, launch in self._network.launches.items()}
        return max(
            (node for node, event in last.items() if "leader" not in event), key=lambda node: last[node]["attempt"]
        )

    def _wait_for_checkpoint(self, before: CheckpointRow, *, nodes: int) -> None:
        wait_until(
            lambda: self._checkpoints()[-1].attempt > before.attempt and self._checkpoints()[-1].world_size == nodes,
            what=f"a checkpoint of {nodes} nodes after attempt {before.attempt}",
        )

    def _checkpoints(self) -> Sequence[CheckpointRow]:
        return self._network.arena.rows(self._spec.run, CheckpointRow)


def main() -> int:
    """Run a campaign. Return the exit status."""
    options = argparse.ArgumentParser()
    options.add_argument("--faults", type=int, default=20)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--quick", action="store_true")
    chosen = options.parse_args()
    kinds = choose(5 if chosen.quick else chosen.faults, random.Random(chosen.seed))
    healed: list[Fault] = []
    with (
        tempfile.TemporaryDirectory(prefix="dlac-soak-nodes-") as folder,
        pytest.MonkeyPatch.context() as patch,
        open_network(Path(folder), patch) as network,
    ):
        network.arena.table()
        spec = network.job(_RUN, f"{_LEAST}:{_NODES}", passes=_PASSES_PER_FAULT * len(kinds))
        campaign = Campaign(network, spec, random.Random(chosen.seed))
        campaign.wait_for_first()
        try:
            for kind in kinds:
                healed.append(campaign.strike(kind))
                print(json.dumps(asdict(healed[-1])), flush=True)
            campaign.stop()
        except (AssertionError, LookupError) as err:
            print(f"not healed: {err!r}", flush=True)
        figures = {
            "faults": Figure(value=len(kinds), unit="faults"),
            "healed": Figure(value=len(healed), unit="faults", bar=f">= {len(kinds)}"),
            **_seconds_of(healed),
            **_account_of(network, spec),
        }
    report("soak_nodes", figures)
    return 0 if all(figure.holds for figure in figures.values()) else 1


def _seconds_of(healed: Sequence[Fault]) -> dict[str, Figure]:
    by_kind = {kind: [fault.healed_s for fault in healed if fault.kind == kind] for kind in _KINDS}
    return {
        f"{kind.replace(' ', '_')}_s": Figure(value=statistics.median(found), unit=f"s, median of {len(found)}")
        for kind, found in by_kind.items()
        if found
    }


def _account_of(network: Network, spec: JobSpec) -> dict[str, Figure]:
    """Return the final checks of the run, compared with a run of one rank without faults."""
    arena = network.arena
    undisturbed = {"nodes": "", "world_size": 1, "pause_s": 0, "every_steps": 100}
    alone = job(arena, "alone", batch_size=BATCH, passes=spec.passes_of(spec.sources[0]), **undisturbed)
    launch = arena.launch(alone)
    if launch.wait() != 0:
        raise RuntimeError(f"expected the undisturbed run to finish, found {launch.stderr[-2000:]}")
    journal, losses = arena.journal(_RUN), arena.losses(_RUN)
    expected = {step: rows for step, rows in arena.journal("alone").items() if step <= len(losses)}
    recorded = sorted(chain(*arena.recorded(_RUN).values()))
    differs = [abs(loss / right - 1) for loss, right in zip(losses, arena.losses("alone"), strict=False)]
    return {
        "steps": Figure(value=len(losses), unit="steps"),
        "attempts": Figure(value=len(arena.rows(_RUN, ClaimRow)), unit="attempts"),
        "audit_exact": Figure(value=audit_run(arena.lakehouse, _RUN).exact, unit="of 1", bar=">= 1"),
        "journal_agrees": Figure(value=recorded == sorted(chain(*journal.values())), unit="of 1", bar=">= 1"),
        "batches_as_undisturbed": Figure(value=journal == expected, unit="of 1", bar=">= 1"),
        "losses_differ": Figure(value=max(differs), unit="of the loss", bar=f"<= {_LOSS_DIFFERS}"),
    }


_KINDS = (_NODE, _LEADER, _NEWCOMER, _CUT, _RANK)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except pytest.skip.Exception as missing:
        sys.exit(f"expected root, iproute2 and PostgreSQL, found a node that {missing.msg}: use another node")
