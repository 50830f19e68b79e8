"""Bytes over the network, by how a run survives a dead rank: `python -m benchmarks.traffic [--quick]`.

Four ranks (or replica groups) train one model of 4 M parameters on a node with a network of its own, a network namespace. The
catalog and the object store (SeaweedFS) are on another one, so the counters of the node's interfaces separate what goes between
ranks (loopback) from what comes from and goes to catalog and store (eth0). Headers of packets count.

- Modes: `relaunch` from the last checkpoint, `memory` (states in memory), `per_step` (replica groups).
- Normal operation: the bytes of a run without faults between two steps, per step, with a checkpoint every 20. Of the bytes
  between ranks, 2 (n - 1) times the gradients are those of any ring all-reduce: the rest is stated as well.
- A recovery: the bytes of a run of as many steps in which ranks were killed, less those of the run without faults, per kill.

`--nodes` measures what two nodes send that keep states in memory for each other, per step and per recovery, beside a run without
states. There a recovery is all that the nodes and their spares send between the kill and the first new step.

It needs root and iproute2, and PostgreSQL with `--nodes`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.programs.recovery_sizes import WIDTH
from benchmarks.recovery_lab.node_traffic import measure_between_nodes
from benchmarks.recovery_lab.training import fill_source
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.elastic.ranks.launch_folder import pid_file
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse, connect
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import CheckpointRow
from dlac_pipeline.spec.job_spec import JobSpec, parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor
from tests.network_namespaces import SWITCH, network_node, open_switch
from tests.seaweedfs import SeaweedFS, seaweedfs

RANKS = 4
HIDDEN = 62_000
_PARAMETERS = HIDDEN * WIDTH + HIDDEN + HIDDEN + 1
_GRADIENT_BYTES, _STATE_BYTES = 4 * _PARAMETERS, 12 * _PARAMETERS
_EVERY_STEPS, _STEPS_PER_KILL, _PAUSE_S = 20, 30, 0.1
MODES: dict[str, dict[str, dict[str, Any]]] = {
    "relaunch": {"checkpoint": {"memory": ""}, "launch": {"world_size": RANKS}},
    "memory": {"checkpoint": {"memory_every_steps": 10}, "launch": {"world_size": RANKS}},
    "per_step": {"launch": {"replicas": RANKS}},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes since the node began."""

    between_ranks: int
    from_store: int
    to_store: int

    @classmethod
    def now(cls) -> Traffic:
        """Read the counters of this process's network."""
        counted = {}
        for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
            name, _, values = line.partition(":")
            counted[name.strip()] = [int(each) for each in values.split()]
        return cls(between_ranks=counted["lo"][0], from_store=counted["eth0"][0], to_store=counted["eth0"][8])

    def since(self, before: Traffic) -> Traffic:
        """Return the bytes since an earlier moment."""
        names = self.__slots__
        return replace(self, **{name: getattr(self, name) - getattr(before, name) for name in names})


class Course:
    """One run, in this process, on this network."""

    def __init__(self, home: Path, server: SeaweedFS, mode: str, name: str, steps: int) -> None:
        self._last_step = home / f"{name}.step"
        self._events: list[dict[str, Any]] = []
        self._settings = MODES[mode]
        raw: dict[str, Any] = {
            "run": name,
            "lakehouse": server.lakehouse("dlac").model_dump(),
            "source": {"table": "src.rows", "columns": ["x"], "passes": 1_000},
            "order": {"batch_size": 64, "key_groups": 8, "steps": steps},
            "checkpoint": {
                "every_steps": _EVERY_STEPS,
                "keep_last": 2,
                "store": "s3://store/checkpoints",
                "store_properties": server.properties,
                "local": str(home / "checkpoints"),
            },
            "launch": {"script": str(Path(__file__).parent / "programs" / "traffic_rank.py")},
            "params": {"hidden": str(HIDDEN), "last_step": str(self._last_step), "pause_s": str(_PAUSE_S)},
        }
        for section, values in self._settings.items():
            raw[section] |= values
        self.spec: JobSpec = parse_spec(raw, origin="the benchmark").resolved(home)
        self._folder = home / "checkpoints" / name

    def run(self, kills: int) -> Traffic:
        """Train to the end, with kills at equal distances. Return the bytes from the third step to the last one."""
        thread = threading.Thread(target=Supervisor(Request(spec=self.spec), on_event=self._events.append).run)
        thread.start()
        self._wait_for_step(3)
        before = Traffic.now()
        for number in range(kills):
            self._wait_for_step(5 + number * _STEPS_PER_KILL)
            self._kill(number % RANKS)
            self._wait_for(number + 1)
        thread.join()
        if not any(event["event"] == "finished" for event in self._events):
            raise SystemExit(f"run {self.spec.run} did not finish: {self._events[-3:]}")
        return Traffic.now().since(before)

    def _wait_for_step(self, step: int) -> None:
        while True:
            steps = [int(path.read_text() or 0) for path in self._last_step.parent.glob(f"{self._last_step.stem}.*")]
            if max(steps, default=0) >= step:
                return
            time.sleep(0.02)

    def _kill(self, rank: int) -> None:
        launch = max(self._folder.glob("launch-*"), key=lambda path: path.stat().st_mtime)
        os.kill(int(pid_file(launch, rank).read_text()), signal.SIGKILL)

    def _wait_for(self, recoveries: int) -> None:
        while sum(event["event"] in ("recovered", "group_rejoined") for event in self._events) < recoveries:
            time.sleep(0.02)


def measure(mode: str, home: Path, server: SeaweedFS, lakehouse: Lakehouse, kills: int) -> dict[str, Figure]:
    """Run one mode with and without kills."""
    steps = 10 + kills * _STEPS_PER_KILL
    calm = Course(home, server, mode, f"{mode}-calm", steps).run(0)
    killed = Course(home, server, mode, f"{mode}-killed", steps)
    extra = killed.run(kills).since(calm)
    lost = audit_run(lakehouse, killed.spec.run)
    checkpoints = len(Ledger(lakehouse).rows(f"{mode}-calm", kinds=(CheckpointRow,)))
    print(json.dumps({"mode": mode, "checkpoints": checkpoints, "steps": steps}), flush=True)
    ring = 2 * (RANKS - 1) * _GRADIENT_BYTES
    trained = steps - 3
    return {
        f"{mode}_between_ranks_per_step": _megabytes(calm.between_ranks / trained),
        f"{mode}_beyond_gradients_per_step": _megabytes(calm.between_ranks / trained - ring),
        f"{mode}_from_store_per_step": _megabytes(calm.from_store / trained),
        f"{mode}_to_store_per_step": _megabytes(calm.to_store / trained),
        f"{mode}_between_ranks_per_recovery": _megabytes(extra.between_ranks / kills),
        f"{mode}_from_store_per_recovery": _megabytes(extra.from_store / kills),
        f"{mode}_to_store_per_recovery": _megabytes(extra.to_store / kills),
        f"{mode}_exact": Figure(value=float(lost.exact), unit="of 1", bar=">= 1"),
    }


def _megabytes(count: float) -> Figure:
    return Figure(value=count / 1e6, unit="MB")


def _on_node(address: str, kills: int, modes: list[str]) -> None:
    """Measure on the network of this process."""
    with tempfile.TemporaryDirectory(prefix="dlac-traffic-") as folder:
        home, store = Path(folder) / "home", Path(folder) / "store"
        home.mkdir()
        store.mkdir()
        with seaweedfs(store, address=address, under=["ip", "netns", "exec", SWITCH]) as server:
            lakehouse = connect(server.lakehouse("dlac"))
            fill_source(lakehouse)
            figures: dict[str, Figure] = {"state": _megabytes(_STATE_BYTES), "gradients": _megabytes(_GRADIENT_BYTES)}
            for mode in modes:
                figures |= measure(mode, home, server, lakehouse, kills)
            report("traffic", figures)


def main() -> None:
    """Make the networks, and measure on one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=MODES)
    parser.add_argument("--nodes", action="store_true", help="two nodes with states in memory instead")
    parser.add_argument("--at", default="", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.at:
        _on_node(chosen.at, 3 if chosen.quick else 10, chosen.modes)
        return
    if chosen.nodes:
        steps, kills = (20, 1) if chosen.quick else (200, 5)
        report("traffic", measure_between_nodes(steps, kills))
        return
    with open_switch() as address, network_node("dlac-traffic") as node:
        command = [*node.command, sys.executable, "-m", "benchmarks.traffic", "--at", address, *sys.argv[1:]]
        sys.exit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main()
