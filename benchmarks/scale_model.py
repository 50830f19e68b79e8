"""Recovery at 8 to 4,096 nodes, from measured parts: `python -m benchmarks.scale_model [--quick] [--control FILE]`.

A model, not a measurement. Each part of a recovery is measured on this node with the product's own code. Stated assumptions
combine the parts. Parts that grow with nodes or ranks are extrapolated by the best curve a + c n log2 n (neither negative).
A vote is the exception: a rank sends and receives O(log n) messages, so its work is fitted by a + c log2 n.

- coordination: processor time of the leader and of the store since the loss is known, in recoveries of real supervisors
  (`benchmarks/control_plane.py`). FILE is its kept result. Without FILE 8 and 32 nodes are measured.
- process groups and votes: 2 to 32 processes. They are compared with Gloo's published start-up: 18, 25 and 85 s at 2,048,
  4,096 and 8,192 ranks (pull request 408 of Gloo), as c n log2 n.

A second of a process's processor time counts as a second, as a real node has its own processors. `--quick`: up to 8 processes,
smaller files.

`a_rank_dies`: a rank is killed, and all nodes remain. `a_node_is_lost`: the others wait until it counts as lost, and then
for a last call. The state's conversion to fewer ranks is not included. `resume_point`: until all nodes have the verified resume
point. `first_step`: until the first step, with process groups as measured here. `first_step_gloo`: with Gloo's published times.
"""

import json
import os
import random
import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import log2
from pathlib import Path

import numpy as np
import torch

from benchmarks.control_lab.scenario import ONE
from benchmarks.control_plane import figures_of, lakehouse, measure
from benchmarks.figures import Figure, report
from benchmarks.programs.scale_processes import Together, join_ranks
from benchmarks.recovery import campaign
from dlac_pipeline.checkpoint.manifest import FileEntry, verify_entries
from dlac_pipeline.lakehouse.store_files import StoreFiles, file_digest
from dlac_pipeline.spec.launch_spec import LaunchSpec

_NODES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_BARS_S = {256: 45, 4096: 60}
_CONTROL_NODES = (8, 32)
_GLOO_S = {2048: 18.0, 4096: 25.0, 8192: 85.0}
"""Seconds in which Gloo starts so many ranks, by its pull request 408."""
_REPEATS = 3
Curve = Callable[[float], float]

RANKS_PER_NODE = 8
PARAMETERS = 1.5e9
BYTES_PER_PARAMETER = 14
"""Bytes per parameter: bf16 weights, and an fp32 copy of them with Adam's two moments."""
GROUPS = 2
"""Process groups of all ranks: one of the script and one of DLAC (dlac_pipeline/elastic/ranks/communicator.py)."""
VOTES = 10
"""Rounds of votes from a rank's start to its first step: fetched, converted, loaded, cursors."""
ROUND_TRIP_S = 0.0002
ASSUMED = {
    "ranks_per_node": (RANKS_PER_NODE, "ranks"),
    "parameters": (PARAMETERS, "parameters, whatever the nodes"),
    "bytes_per_parameter": (BYTES_PER_PARAMETER, "bytes"),
    "files_per_rank": (3, "files of a checkpoint"),
    "process_groups": (GROUPS, "groups of all ranks"),
    "rounds_of_votes": (VOTES, "rounds"),
    "told_and_answered": (1.0, "s, until every node has heard what to verify and the leader what was found"),
    "network_round_trip": (1e3 * ROUND_TRIP_S, "ms"),
}
ASSUMPTIONS = (
    "a node has processors of its own, as fast as one here; the store's server is one thread",
    "all nodes verify the checkpoint, each its part, as the product does, at the rate measured here with two cores and the files "
    "in memory: the shared file system is as fast for all of them at once",
    "every rank reads its share of the checkpoint at the rate measured for one rank here, all at once: the file system does "
    "not slow down; accelerators and their own process groups cost nothing",
    "claim, start of ranks (forked), engine and first step take what they take in a small run here: the catalog answers "
    "all ranks at once as it answers two, and the model's first step is as short",
    "host names resolve at once: torch looks up the name of every peer when it connects, and a resolver that drops bursts costs "
    "5 s (found here with 20 processes and more: measured_store_connect, not in the model)",
    "the curve a + c n log2 n holds for coordination beyond 256 nodes and for process groups beyond 32 processes",
    "the busiest rank's work in a vote follows a + c log2 n beyond 32 processes: without failures all messages have one size",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The parts in seconds, and rates in bytes per second."""

    fixed: Mapping[str, float]
    """Median phases of recoveries of two ranks."""
    verify_rate: float
    file_s: float
    """Seconds per file, for any content."""
    load_rate: float
    coordinate: Curve
    """Seconds by nodes: to agree on the next round, its resume point and the start of ranks, without timeouts."""
    group: Curve
    """Seconds by ranks: to make a process group."""
    gloo: Curve
    """Seconds by ranks to make a process group, as Gloo published them."""
    vote: Curve
    """Seconds by ranks: a vote up and the decision down."""


def main() -> None:
    """Measure the parts, combine them, and report."""
    options = ArgumentParser()
    options.add_argument("--quick", action="store_true")
    options.add_argument("--control", type=Path, help="the kept result of benchmarks.control_plane")
    chosen = options.parse_args()
    quick = chosen.quick
    control = _control_plane() if chosen.control is None else _read_points(chosen.control)
    counts = (2, 4, 8) if quick else (2, 4, 8, 16, 32)
    joins = {count: [join_ranks(count, lazily=True) for _ in range(_REPEATS)] for count in counts}
    eager = {count: _medians([join_ranks(count, lazily=False)["group"] for _ in range(_REPEATS)]) for count in counts}
    groups = {count: _medians([each["group"] for each in runs]) for count, runs in joins.items()}
    votes = {count: _medians([each["vote"] for each in runs]) for count, runs in joins.items()}
    print(json.dumps({"assumed": ASSUMPTIONS, "loadavg": os.getloadavg()}), flush=True)
    with tempfile.TemporaryDirectory(prefix="dlac-scale-") as folder:
        verify_rate, file_s, load_rate = _rates(Path(folder), 2**26 if quick else 2**29)
        (home := Path(folder) / "recoveries").mkdir()
        _, recovered = campaign(home, "forked", 2 if quick else 5, random.Random(0))
    phases = ("detect_s", "stop_s", "claim_s", "load_s", "first_step_s")
    parts = Measured(
        fixed={phase: statistics.median(one[phase] for one in recovered) for phase in phases},
        verify_rate=verify_rate,
        file_s=file_s,
        load_rate=load_rate,
        coordinate=_coordinating(control),
        group=_grows(groups),
        gloo=_proportional(_GLOO_S),
        vote=_voting(votes),
    )
    figures = {f"assumed_{name}": Figure(value=value, unit=unit) for name, (value, unit) in ASSUMED.items()}
    figures |= _measured_figures(parts)
    for name, measured in (("group", groups), ("group_by_default", eager), ("vote", votes)):
        figures |= _growth(name, measured)
    for nodes, each in control.items():
        figures |= {f"measured_{name}_{nodes}_nodes": Figure(value=value, unit="s") for name, value in each.items()}
    for ranks, seconds in _GLOO_S.items():
        figures[f"gloo_published_{ranks}"] = Figure(value=seconds, unit="s")
        figures[f"gloo_fitted_{ranks}"] = Figure(value=parts.gloo(ranks), unit="s")
    figures["measured_store_connect"] = Figure(
        value=max(each["connect"].wall_s for each in joins[counts[-1]]),
        unit=f"s, {counts[-1]} processes at once, worst",
    )
    report("scale_model", figures | _model_figures(parts))


def _model_figures(parts: Measured) -> dict[str, Figure]:
    """Return both recoveries at every size, and their parts at sizes with a bar."""
    launch = LaunchSpec(script="")
    timeouts_s = launch.node_timeout_s + launch.last_call_s
    found = {}
    for nodes in _NODES:
        bar = f"<= {_BARS_S[nodes]}" if nodes in _BARS_S else None
        phases = phases_at(parts, nodes)
        to_point = phases["coordinate"] + phases["verify"]
        to_step = to_point + sum(phases[name] for name in ("groups", "load", "votes", "first_step"))
        with_gloo = to_step - phases["groups"] + phases["groups_gloo"]
        for name, total in (("resume_point", to_point), ("first_step", to_step), ("first_step_gloo", with_gloo)):
            lost, dies = f"a_node_is_lost_{name}_{nodes}", f"a_rank_dies_{name}_{nodes}"
            found[lost] = Figure(value=total + timeouts_s, unit="s, modelled", bar=bar)
            found[dies] = Figure(value=total + phases["detect"], unit="s, modelled", bar=bar)
        if nodes in _BARS_S:
            found |= {f"{name}_{nodes}": Figure(value=value, unit="s, modelled") for name, value in phases.items()}
    return found


def phases_at(parts: Measured, nodes: int) -> dict[str, float]:
    """Seconds of each phase after the death of a rank."""
    ranks = RANKS_PER_NODE * nodes
    size = PARAMETERS * BYTES_PER_PARAMETER
    return {
        "detect": parts.fixed["detect_s"],
        "coordinate": parts.coordinate(nodes),
        "verify": (size / parts.verify_rate + ASSUMED["files_per_rank"][0] * ranks * parts.file_s) / nodes
        + ASSUMED["told_and_answered"][0],
        "groups": GROUPS * parts.group(ranks),
        "groups_gloo": GROUPS * parts.gloo(ranks),
        "groups_gloo_of_a_rank_per_node": GROUPS * parts.gloo(nodes),
        "load": parts.fixed["load_s"] + size / ranks / parts.load_rate,
        "votes": VOTES * parts.vote(ranks),
        "first_step": parts.fixed["first_step_s"],
    }


def _measured_figures(parts: Measured) -> dict[str, Figure]:
    return {f"measured_{phase}": Figure(value=value, unit="s") for phase, value in parts.fixed.items()} | {
        "measured_verify_rate": Figure(value=parts.verify_rate / 1e9, unit="GB/s"),
        "measured_verify_per_file": Figure(value=1e3 * parts.file_s, unit="ms"),
        "measured_load_rate": Figure(value=parts.load_rate / 1e9, unit="GB/s"),
        "load_average_1min": Figure(value=os.getloadavg()[0], unit="processes"),
    }


def _growth(name: str, measured: dict[int, Together]) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for count, each in measured.items():
        found |= {
            f"measured_{name}_{count}_wall": Figure(value=1e3 * each.wall_s, unit="ms on two cores"),
            f"measured_{name}_{count}_processor": Figure(value=1e3 * each.cpu_s, unit="ms of the busiest process"),
            f"measured_{name}_{count}_server": Figure(value=1e3 * each.server_cpu_s, unit="ms of the store"),
        }
    return found


def _control_plane() -> dict[int, dict[str, float]]:
    """Measure recoveries of real supervisors."""
    with lakehouse() as (home, catalog):
        found = [measure(home, catalog, nodes=nodes, scenario=ONE) for nodes in _CONTROL_NODES]
    return _points({name: {"value": figure.value} for name, figure in figures_of(found).items()})


def _read_points(file: Path) -> dict[int, dict[str, float]]:
    """Read recoveries of real supervisors that another program measured."""
    return _points(json.loads(file.read_text())["figures"])


def _points(figures: Mapping[str, Mapping[str, float]]) -> dict[int, dict[str, float]]:
    """Return the duration of a recovery from the loss of one node, by the number of nodes."""
    sizes = sorted(int(name.split("_")[1]) for name in figures if name.startswith(f"{ONE}_") and name.endswith("_wall"))
    names = ("beyond_timeouts", "leader_cpu_since_noticed", "store_cpu_since_noticed")
    return {nodes: {name: figures[f"{ONE}_{nodes}_{name}"]["value"] for name in names} for nodes in sizes}


def _coordinating(measured: Mapping[int, Mapping[str, float]]) -> Curve:
    """Return the time with the fewest nodes, plus the work that leader and store add for more nodes."""
    busy = {
        nodes: each["leader_cpu_since_noticed"] + each["store_cpu_since_noticed"] for nodes, each in measured.items()
    }
    work = _curve(busy)
    least = min(measured)
    return lambda nodes: measured[least]["beyond_timeouts"] + max(0.0, work(nodes) - work(least))


def _voting(measured: dict[int, Together]) -> Curve:
    """Return the time of a message per level up and down the tree, plus the busiest rank's processor time."""
    hop_s = measured[2].wall_s / 2 + ROUND_TRIP_S / 2
    work = _curve({count: each.cpu_s for count, each in measured.items()}, grows=log2)
    return lambda ranks: 2 * log2(ranks) * hop_s + work(ranks)


def _grows(measured: dict[int, Together]) -> Curve:
    """Return the processor time of the busiest process plus that of the store."""
    process = _curve({count: each.cpu_s for count, each in measured.items()})
    server = _curve({count: each.server_cpu_s for count, each in measured.items()})
    return lambda count: process(count) + server(count)


def _n_log_n(count: float) -> float:
    return count * log2(count)


def _curve(measured: Mapping[int, float], grows: Curve = _n_log_n) -> Curve:
    """Fit a + c grows(n), neither part negative, to the measured seconds by least squares."""
    seconds = np.array([*measured.values()])
    basis = np.array([(1.0, grows(count)) for count in measured])
    constant, factor = np.linalg.lstsq(basis, seconds, rcond=None)[0]
    if factor < 0:
        constant, factor = float(seconds.mean()), 0.0
    if constant < 0:
        return _proportional(measured, grows)
    return lambda count: float(constant + factor * grows(count))


def _proportional(measured: Mapping[int, float], grows: Curve = _n_log_n) -> Curve:
    """Fit c grows(n) to the measured seconds by least squares."""
    basis = np.array([grows(count) for count in measured])
    factor = float(basis @ np.array([*measured.values()]) / (basis @ basis))
    return lambda count: factor * grows(count)


def _medians(runs: list[Together]) -> Together:
    return Together(
        wall_s=statistics.median(run.wall_s for run in runs),
        cpu_s=statistics.median(run.cpu_s for run in runs),
        server_cpu_s=statistics.median(run.server_cpu_s for run in runs),
    )


def _rates(folder: Path, size: int) -> tuple[float, float, float]:
    """Return the bytes per second that a node verifies, its seconds per file, and the bytes per second that a rank loads."""
    large = [folder / f"large-{number}" for number in range(4)]
    for path in large:
        torch.save({"state": torch.rand(size // len(large) // 4)}, path)
    small = [folder / f"small-{number}" for number in range(1024)]
    for path in small:
        path.write_bytes(os.urandom(512))
    verify_s, file_s = _verified_s(large), _verified_s(small) / len(small)
    rank_loads_s = _seconds(lambda: torch.load(large[0], weights_only=True))
    return sum(path.stat().st_size for path in large) / verify_s, file_s, large[0].stat().st_size / rank_loads_s


def _verified_s(paths: list[Path]) -> float:
    entries = [FileEntry(path=path.name, bytes=path.stat().st_size, digest=file_digest(path)) for path in paths]
    files = StoreFiles(deadline_s=0.0)
    return _seconds(lambda: verify_entries(entries, paths[0].parent.as_uri(), files))


def _seconds(work: Callable[[], object]) -> float:
    """Return the median of several runs, in seconds."""
    times = []
    for _ in range(_REPEATS):
        began = time.monotonic()
        work()
        times.append(time.monotonic() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
