"""Replica groups on three nodes, which are killed and cut, for `python -m benchmarks.per_step --nodes`.

Nodes are network namespaces. A killed node is unplugged first, so it closes no connection. DLAC has a spare node. torchft alone
has a loop that starts dead processes again, on a node that is plugged in again, and its lighthouse on another node.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.figures import Figure
from benchmarks.recovery_lab.nodes import open_source_network
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.extensions.replicas.rank import read_lighthouse
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from tests.conftest import wait_until
from tests.network_namespaces import SWITCH, NetworkNode, network_node
from tests.node_network import Network

NODES, GROUPS_HERE = 3, 2
GROUPS = NODES * GROUPS_HERE
BATCH = 48
KINDS = ("process", "node", "leader", "lighthouse", "cut")
TORCHFT_KINDS = ("process", "node", "cut")
_TAIL_BYTES = 8192
_CALM_S = 2.0
"""Seconds of undisturbed steps after each recovery."""
_CUT_S = 1.5
"""Seconds of a cut, after which no node is lost."""
_PROGRAMS = Path(__file__).parents[1] / "programs"
_TORCHFT_PORT = 29600


@dataclass
class Side:
    """One side of the comparison: its journal, and what its kills have cost."""

    folder: Path
    downtimes: dict[str, list[float]] = field(default_factory=dict)
    restarted: int = 0
    """Processes that were replaced beside those that were killed."""

    def committed(self, since: Mapping[Path, int] | None = None) -> list[dict[str, Any]]:
        """Return the committed steps in the last lines of all processes, or in all after these sizes, in order of time."""
        found = []
        for path in self.folder.glob("*.jsonl"):
            with path.open("rb") as stream:
                stream.seek(max(0, path.stat().st_size - _TAIL_BYTES) if since is None else since.get(path, 0))
                for line in stream:
                    with suppress(ValueError):  # half a line
                        found.append(json.loads(line))
        return sorted((each for each in found if each["event"] == "committed"), key=lambda each: float(each["at"]))

    def pids(self) -> dict[int, int]:
        """Return the process that has committed last, by group."""
        return {line["group"]: line["pid"] for line in self.committed()}

    def wait_for_all(self, after: float = 0.0) -> None:
        """Wait until all groups commit the same steps, after a moment."""

        def are_there() -> bool:
            self.start_again()
            last = {line["group"]: line for line in self.committed()}.values()
            steps = [line["step"] for line in last]
            fresh = all(line["at"] > max(after, time.time() - 1.0) for line in last)
            return len(last) == GROUPS and max(steps) - min(steps) <= 1 and fresh

        wait_until(are_there, what="steps of all groups", pause_s=0.2)

    def run(self, kinds: Sequence[str], count: int) -> None:
        """Disturb the groups in each way by turns, and note the downtimes."""
        chance = random.Random(7)
        for number in range(count):
            self.wait_for_all()
            kind, before = kinds[number % len(kinds)], self.pids()
            sizes = {path: path.stat().st_size for path in self.folder.glob("*.jsonl")}
            began = time.time()
            killed = self.kill(kind, chance)
            self.wait_for_all(time.time() + 1.0)
            time.sleep(_CALM_S)
            first: dict[int, float] = {}
            for line in self.committed(sizes):
                first.setdefault(line["step"], line["at"])
            moments = sorted(at for at in first.values() if at > began)
            step_s = statistics.median(later - at for at, later in itertools.pairwise(moments))
            self.downtimes.setdefault(kind, []).append(max(0.0, moments[1] - began - 2 * step_s))
            same = sum(pid == before[group] for group, pid in self.pids().items())
            self.restarted += 0 if kind == "leader" else GROUPS - same - killed
            print(json.dumps({"kind": kind, "downtime_s": self.downtimes[kind][-1]}), flush=True)

    def start_again(self) -> None:
        """Start the processes that have ended, if nothing else does."""

    def kill(self, kind: str, chance: random.Random) -> int:
        """Disturb the groups, and return how many processes were killed."""
        raise NotImplementedError

    def figures(self, name: str) -> dict[str, Figure]:
        """Return the downtimes."""
        print(json.dumps({"side": name, "downtimes_s": self.downtimes}), flush=True)
        return {
            f"{name}_{kind}_downtime_p50_s": Figure(value=statistics.median(each), unit="s")
            for kind, each in self.downtimes.items()
        }


class DlacSide(Side):
    """DLAC on three nodes with a spare."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.arena.home / "groups")
        self.folder.mkdir()
        self.network, self.spec, self._joined = network, self._make_spec(network), 0
        for _ in range(NODES + 1):
            self.join()

    def _make_spec(self, network: Network) -> JobSpec:
        raw = {
            "run": "groups",
            "source": {"table": "src.t", "columns": ["row_id", "x"], "passes": 0},
            "order": {"batch_size": BATCH, "key_groups": 24, "seed": 3, "steps": 10_000_000},
            "checkpoint": {"every_s": 3, "mode": "asynchronous", "keep_last": 2},
            "launch": {
                "script": str(_PROGRAMS / "per_step_rank.py"),
                "replicas": GROUPS,
                "nodes": str(NODES),
                "rendezvous": network.rendezvous,
                "node_timeout_s": 3,
                "last_call_s": 1,
            },
            "params": {"journal": str(self.folder)},
        }
        spec = parse_spec(raw, origin="the benchmark").resolved(network.arena.home)
        return spec.model_copy(update={"lakehouse": network.catalog})

    def join(self) -> None:
        """Start another node."""
        self._joined += 1
        self.network.join(f"dlac-g{self._joined}", self.spec)

    def leader_and_others(self) -> tuple[NetworkNode, list[NetworkNode]]:
        """Return the nodes of the last attempt."""
        last = {node: each.of("attempt")[-1] for node, each in self.network.launches.items() if each.of("attempt")}
        newest = max(event["attempt"] for event in last.values())
        training = [node for node, event in last.items() if event["attempt"] == newest]
        leader = next(node for node in training if "leader" not in last[node])
        return leader, [node for node in training if node is not leader]

    def kill(self, kind: str, chance: random.Random) -> int:
        """Disturb the groups, and return how many processes were killed."""
        leader, others = self.leader_and_others()
        victim = leader if kind == "leader" else chance.choice(others)
        if kind == "process":
            os.kill(chance.choice(list(self.pids().values())), signal.SIGKILL)
        elif kind == "lighthouse":
            folder = Path(self.spec.checkpoint.local) / self.spec.run
            found = [read_lighthouse(each) for each in folder.glob("launch-*/")]
            pids = [each.pid for each in found if each is not None and psutil.pid_exists(each.pid)]
            # the other nodes' files have the pid of their supervisor
            (running,) = [pid for pid in pids if "lighthouse" in " ".join(psutil.Process(pid).cmdline())]
            os.kill(running, signal.SIGKILL)
        elif kind == "cut":
            victim.unplug()
            time.sleep(_CUT_S)
            victim.plug()
        else:
            self.network.lose(victim)
            self.join()
            return GROUPS_HERE
        return int(kind == "process")

    def stop(self) -> None:
        """Stop the run after a checkpoint."""
        leader, others = self.leader_and_others()
        for node in [node for node in self.network.launches if node not in (leader, *others)]:
            self.network.lose(node)
        self.network.launches[leader].process.send_signal(signal.SIGTERM)
        self.network.check_finished()


class TorchftSide(Side):
    """torchft alone in three namespaces. Its lighthouse is on the switch."""

    def __init__(self, network: Network) -> None:
        super().__init__(network.arena.home / "torchft")
        self.folder.mkdir()
        (network.arena.home / "saved").mkdir()
        rows = {"row_id": torch.arange(100_000), "x": torch.rand(100_000, 4), "batch_size": BATCH}
        torch.save(rows, network.arena.home / "rows.pt")
        self._home, self._lighthouse = network.arena.home, f"http://{network.address}:{_TORCHFT_PORT}"
        self._nodes = [network.stack.enter_context(network_node(f"dlac-t{number}")) for number in range(NODES)]
        program = [sys.executable, str(_PROGRAMS / "per_step_lighthouse.py"), str(_TORCHFT_PORT), network.address]
        self._server = subprocess.Popen(["ip", "netns", "exec", SWITCH, *program])
        self._processes = {group: self._start(group) for group in range(GROUPS)}
        self.stuck = 0
        """Times that groups were not back within the limit of a wait."""

    def start_again(self) -> None:
        """Start the processes that have ended, as the launcher that torchft's documentation names does."""
        for group, process in self._processes.items():
            if process.poll() is not None:
                self._processes[group] = self._start(group)

    def run(self, kinds: Sequence[str], count: int) -> None:
        """Disturb the groups as on the other side. If some are not back in time, count it, and start all of them again."""
        left = count
        while left:
            before = sum(map(len, self.downtimes.values()))
            try:
                super().run(kinds, left)
            except AssertionError:
                self.stuck += 1
                left -= 1
                print(json.dumps({"kind": "stuck"}), flush=True)
                self._kill_all()
                self._processes = {group: self._start(group) for group in range(GROUPS)}
            left -= sum(map(len, self.downtimes.values())) - before

    def figures(self, name: str) -> dict[str, Figure]:
        """Return the downtimes, and how often groups did not come back."""
        return {**super().figures(name), f"{name}_stuck": Figure(value=self.stuck, unit="times")}

    def _start(self, group: int) -> subprocess.Popen[bytes]:
        node = self._nodes[group // GROUPS_HERE]
        numbers = [str(group), str(GROUPS), "sampler", self._lighthouse, str(self._home / "rows.pt")]
        arguments = [*numbers, str(self.folder), str(self._home / "saved"), "10000000"]
        settings = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0", "RUST_LOG": "error"}
        environment = {**os.environ, **settings, "PER_STEP_ADDRESS": node.address}
        command = [*node.command, sys.executable, str(_PROGRAMS / "per_step_torchft.py"), *arguments]
        return subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)

    def kill(self, kind: str, chance: random.Random) -> int:
        """Disturb the groups, start dead ones again, and return how many processes were killed."""
        groups = chance.choice([range(first, first + GROUPS_HERE) for first in range(0, GROUPS, GROUPS_HERE)])
        node, killed = self._nodes[groups[0] // GROUPS_HERE], {"process": groups[:1], "node": groups}.get(kind, ())
        if kind != "process":
            node.unplug()
        for group in killed:
            os.kill(self.pids()[group], signal.SIGKILL)
        time.sleep(0.0 if kind == "process" else _CUT_S)
        node.plug()
        for group in killed:
            self._processes[group].wait()
            self._processes[group] = self._start(group)
        return len(killed)

    def stop(self) -> None:
        """Kill all processes."""
        self._kill_all()
        self._server.kill()
        self._server.wait()

    def _kill_all(self) -> None:
        for pid in self.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes.values():
            process.kill()
            process.wait()


def measure_nodes(kills: int, torchft_kills: int) -> dict[str, Figure]:
    """Kill groups of DLAC and of torchft alone on three nodes, by turns in each way."""
    figures: dict[str, Figure] = {}
    with open_source_network() as network:
        network.arena.table(appends=(25_000,) * 4, row_group_rows=1_000)
        dlac = DlacSide(network)
        dlac.run(KINDS, kills)
        dlac.stop()
        torchft = TorchftSide(network)
        torchft.run(TORCHFT_KINDS, torchft_kills)
        torchft.stop()
        for name, side in (("nodes", dlac), ("nodes_torchft", torchft)):
            figures |= side.figures(name)
            figures[f"{name}_other_restarts"] = Figure(value=side.restarted, unit="processes")
        report = audit_run(network.arena.lakehouse, "groups")
        attempts = len(network.arena.rows("groups", ClaimRow))
    leaders = sum(KINDS[number % len(KINDS)] == "leader" for number in range(kills))
    return figures | {
        "nodes_node_downtime_p50_s": Figure(value=figures["nodes_node_downtime_p50_s"].value, unit="s", bar="<= 1"),
        "nodes_other_restarts": Figure(value=figures["nodes_other_restarts"].value, unit="processes", bar="<= 0"),
        "nodes_rows_repeated": Figure(value=report.rows_duplicated, unit="rows", bar="<= 0"),
        "nodes_rows_missing": Figure(value=report.rows_missing, unit="rows", bar="<= 0"),
        "nodes_audit_exact": Figure(value=report.exact, unit="of 1", bar=">= 1"),
        "nodes_kills": Figure(value=kills, unit="kills"),
        "nodes_attempts": Figure(value=attempts - leaders, unit="attempts", bar="<= 1"),
    }
