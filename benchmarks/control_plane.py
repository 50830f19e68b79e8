"""Recoveries of 8 to 256 nodes with real supervisors, all on one node: `python -m benchmarks.control_plane [--quick]`.

Each simulated node is a process with the product's own `Supervisor`: membership, heartbeats through a real TCPStore, a PostgreSQL
catalog for the claim, and the verification of a real checkpoint, which a real training of one rank has committed before. The
processes are forked from one that has imported all libraries. Stubs are the ranks, one per node: each is a Python without PyTorch
that waits for the resume point and writes one progress record (`control_lab/stub_rank.py`). So no state is loaded and no process
group is made. A separate process serves the store, as `dlac rendezvous` does.

For each size a follower, eight nodes at once, the leader, and a rack of 32 nodes are killed with SIGKILL, each with new nodes.
A recovery lasts from the kill until the last surviving node has the resume point of the next attempt, which the leader has
claimed and all nodes have verified together, and its ranks have started. All simulated nodes share the processors of this
node. `--quick` measures the loss of one node of 8 and of 32. `--nodes 8 256` measures these sizes.
"""

import json
import os
import tempfile
from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from math import log2
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # PyTorch prints a stack for each connection of a killed node

from benchmarks.control_lab.job import commit_checkpoint, import_all, job, make_source_apart
from benchmarks.control_lab.scenario import EIGHT, KILLED, LEADER, ONE, RACK, Recovery, recover
from benchmarks.figures import Figure, report
from dlac_pipeline.elastic.ranks.addresses import free_port
from dlac_pipeline.elastic.sealed_store import KEY_VARIABLE
from dlac_pipeline.spec.launch_spec import LaunchSpec
from tests.postgres_server import postgres

SIZES = (8, 32, 64, 128, 256)
_QUICK_SIZES = (8, 32)
_BAR_NODES, _BAR_S, _BAR_CPU = 256, 45, 1.5
_LEAST_SURVIVORS = 4
_RUN = "control-plane"
_SETTINGS = {
    "nproc_per_node": 1,
    "attempts_without_progress": 1_000_000,
    "deaths_at_same_rows": 0,
}
"""Other settings are the defaults. The nodes commit nothing."""


def main() -> None:
    """Measure every size, and report."""
    options = ArgumentParser()
    options.add_argument("--quick", action="store_true")
    options.add_argument("--nodes", type=int, nargs="*", help="sizes of fleets; all by default")
    chosen = options.parse_args()
    quick = chosen.quick
    sizes = chosen.nodes or (_QUICK_SIZES if quick else SIZES)
    found: list[Recovery] = []
    failed: list[tuple[int, str]] = []
    with lakehouse() as (home, catalog):
        for nodes in sizes:
            for scenario in scenarios_of(nodes, quick=quick):
                try:
                    found.append(measure(home, catalog, nodes=nodes, scenario=scenario))
                except TimeoutError as err:
                    failed.append((nodes, scenario))
                    print(json.dumps({"nodes": nodes, "scenario": scenario, "failed": str(err)[:1000]}), flush=True)
                else:
                    print(json.dumps({**asdict(found[-1]), "loadavg": os.getloadavg()}), flush=True)
    figures = {f"recovered_{name}_{nodes}": Figure(value=0, unit="of 1", bar=">= 1") for nodes, name in failed}
    report("control_plane", figures | _settings() | figures_of(found))


@contextmanager
def lakehouse() -> Iterator[tuple[Path, str]]:
    """Yield a folder, and the address of a PostgreSQL catalog with the training table."""
    os.environ.setdefault(KEY_VARIABLE, "the secret of the nodes of this benchmark")
    with tempfile.TemporaryDirectory(prefix="dlac-control-") as folder, postgres(connections=4 * SIZES[-1]) as catalog:
        make_source_apart(Path(folder), catalog)
        yield Path(folder), catalog


def scenarios_of(nodes: int, *, quick: bool = False) -> list[str]:
    """Return the scenarios for a number of nodes in which enough nodes survive."""
    names = (ONE,) if quick else (ONE, EIGHT, LEADER, RACK)
    return [name for name in names if nodes - KILLED[name] >= max(_LEAST_SURVIVORS, nodes // 2)]


def measure(home: Path, catalog: str, *, nodes: int, scenario: str) -> Recovery:
    """Train until a checkpoint is committed, and recover it with simulated nodes."""
    left = nodes - KILLED[scenario]
    run = f"{_RUN}-{nodes}-{left}"
    settings = {name: value for name, value in _SETTINGS.items() if name != "nproc_per_node"}
    alone = job(home, catalog, run=run, counts=[nodes, left], launch=settings)
    if not (home / "store" / run).exists():
        import_all(commit_checkpoint(alone))
    together = {**_SETTINGS, "nodes": f"{left}:{nodes}", "rendezvous": f"127.0.0.1:{free_port()}"}
    spec = job(home, catalog, run=run, counts=[nodes, left], launch=together)
    return recover(spec, home, nodes=nodes, scenario=scenario)


def _settings() -> dict[str, Figure]:
    launch = LaunchSpec(script="")
    return {
        "node_timeout_s": Figure(value=launch.node_timeout_s, unit="s, by default"),
        "last_call_s": Figure(value=launch.last_call_s, unit="s, by default"),
        "processors": Figure(value=os.cpu_count() or 0, unit="processors of this machine"),
        "load_average_1min": Figure(value=os.getloadavg()[0], unit="processes"),
    }


def figures_of(found: Sequence[Recovery]) -> dict[str, Figure]:
    """Return the figures of each recovery, and their growth."""
    figures: dict[str, Figure] = {}
    for each in found:
        figures |= _figures(each)
    by_scenario = {name: {each.nodes: each for each in found if each.scenario == name} for name in KILLED}
    for name, recoveries in by_scenario.items():
        if len(recoveries) > 1:
            figures |= _growth(name, recoveries[min(recoveries)], recoveries[max(recoveries)])
    return figures


def _figures(each: Recovery) -> dict[str, Figure]:
    key = f"{each.scenario}_{each.nodes}"
    launch = LaunchSpec(script="")
    bar = f"<= {_BAR_S}" if each.nodes == _BAR_NODES else None
    found = {
        f"{key}_wall": Figure(value=each.wall_s, unit="s", bar=bar),
        f"{key}_beyond_timeouts": Figure(value=each.wall_s - launch.node_timeout_s - launch.last_call_s, unit="s"),
        f"{key}_noticed": Figure(value=each.noticed_s, unit="s after the kill"),
        f"{key}_round_formed": Figure(value=each.formed_s, unit="s after the kill"),
        f"{key}_claim": Figure(value=each.claim_s, unit="s"),
        f"{key}_verify": Figure(value=each.verify_s, unit="s"),
        f"{key}_last_resume_point": Figure(value=each.point_s, unit="s after the kill"),
        f"{key}_attempts": Figure(value=each.attempts, unit="attempts", bar="<= 1"),
        f"{key}_start": Figure(value=each.start_s, unit="s until all nodes train at first"),
        f"{key}_store_cpu": Figure(value=each.server_cpu_s, unit="s of the store"),
        f"{key}_memory": Figure(value=each.memory_mb, unit="MiB of all supervisors"),
        f"{key}_leader_cpu": Figure(value=_cpu_s(each.leader), unit="s"),
        f"{key}_leader_cpu_since_noticed": Figure(value=each.leader_busy_s, unit="s"),
        f"{key}_store_cpu_since_noticed": Figure(value=each.server_busy_s, unit="s"),
        f"{key}_node_cpu": Figure(value=_cpu_s(each.others), unit="s, median"),
        f"{key}_node_cpu_most": Figure(value=_cpu_s(each.most), unit="s"),
        f"{key}_node_cpu_while_training": Figure(value=1e3 * each.idle["cpu_s"], unit="ms per second"),
    }
    for name in ("operations", "messages"):
        found[f"{key}_node_{name}"] = Figure(value=each.others[name], unit=f"{name}, median")
        found[f"{key}_leader_{name}_per_node"] = Figure(value=each.leader[name] / each.nodes, unit=f"{name} per node")
    found[f"{key}_node_bytes"] = Figure(value=_bytes(each.others), unit="bytes, median")
    found[f"{key}_leader_bytes_per_node"] = Figure(value=_bytes(each.leader) / each.nodes, unit="bytes per node")
    return found


def _growth(scenario: str, small: Recovery, large: Recovery) -> dict[str, Figure]:
    """Return a follower's resource use at the largest size over that at the smallest."""
    key, sizes = f"{scenario}_node", f"{large.nodes}_over_{small.nodes}"
    logarithmic = f"<= {log2(large.nodes) / log2(small.nodes):.3f}"
    operations = large.others["operations"] / small.others["operations"]
    return {
        f"{key}_cpu_{sizes}": Figure(
            value=_cpu_s(large.others) / _cpu_s(small.others), unit="ratio", bar=f"<= {_BAR_CPU}"
        ),
        f"{key}_operations_{sizes}": Figure(value=operations, unit="ratio", bar=logarithmic),
        f"{key}_bytes_{sizes}": Figure(
            value=_bytes(large.others) / _bytes(small.others), unit="ratio", bar=logarithmic
        ),
    }


def _cpu_s(used: Mapping[str, float]) -> float:
    return used["cpu_s"] + used["children_cpu_s"]


def _bytes(used: Mapping[str, float]) -> float:
    return used["sent_bytes"] + used["received_bytes"]


if __name__ == "__main__":
    main()
