"""Bytes that nodes send which keep states in memory for each other, for benchmarks/traffic.py: per step, and per recovery.

A spare waits beside them. What they send to the catalog and to the rendezvous counts.
"""

import json
import statistics
import subprocess
from collections.abc import Sequence

from benchmarks.figures import Figure
from benchmarks.recovery_lab.nodes import KINDS, NodesRun, open_source_network
from dlac_pipeline.audit.audit import audit_run
from tests.network_namespaces import NetworkNode

_STATE_BYTES = 12 * (64 * 1024 + 1024 + 1024 * 1024 + 1024 + 1024 + 1)
"""Weights and AdamW's two moments of the model that `NodesRun` trains."""


def measure_between_nodes(steps: int, kills: int) -> dict[str, Figure]:
    """Measure so many steps with states in memory and without, and so many kills of each kind with them."""
    with open_source_network() as network:
        bare = NodesRun(network, "without", nodes=2, ranks=2, spares=1, keeps_checkpoints=True, keeps_states=False)
        without = _bytes_per_step(bare, steps)
        bare.stop()
        run = NodesRun(network, "states", nodes=2, ranks=2, spares=1, keeps_checkpoints=True)
        within = _bytes_per_step(run, steps)
        recoveries = {kind: [_recovery_bytes(run, kind) for _ in range(kills)] for kind in KINDS}
        run.stop()
        exact = all(audit_run(network.arena.lakehouse, name).exact for name in ("without", "states"))
    return {
        "nodes_state": Figure(value=_STATE_BYTES / 1e6, unit="MB"),
        "nodes_without_states_per_step": Figure(value=without / 1e6, unit="MB"),
        "nodes_with_states_per_step": Figure(value=within / 1e6, unit="MB"),
        **{
            f"nodes_{kind.replace(' ', '_')}_recovery": Figure(value=statistics.median(found) / 1e6, unit="MB")
            for kind, found in recoveries.items()
        },
        "nodes_kills_of_a_kind": Figure(value=kills, unit="kills"),
        "nodes_exact": Figure(value=float(exact), unit="of 1", bar=">= 1"),
    }


def _bytes_per_step(run: NodesRun, steps: int) -> float:
    run.wait_for_steps(6)
    before, stamped = _sent(run.joined), len(run.read_stamps())
    run.wait_for_steps(steps)
    sent = _sent(run.joined) - before
    return sent / (len(run.read_stamps()) - stamped)


def _recovery_bytes(run: NodesRun, kind: str) -> int:
    """Kill, and return the bytes that all nodes send until the first new step."""
    run.wait_for_steps(4)
    victim = run.training()[0]
    before = _sent(run.joined)
    run.kill(kind, victim)
    return _sent(run.joined) - before


def _sent(nodes: Sequence[NetworkNode]) -> int:
    """Return the bytes that nodes have sent, those of lost nodes included."""
    return sum(_sent_by(node) for node in nodes)


def _sent_by(node: NetworkNode) -> int:
    command = ["ip", "-n", node.name, "-stats", "-json", "link", "show", "dev", "eth0"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sent: int = json.loads(shown)[0]["stats64"]["tx"]["bytes"]
    return sent
