"""Recovery at 8 to 4,096 nodes, from measured parts: `python -m benchmarks.scale_model [--quick]`.

A model, not a measurement: nobody here has 256 nodes. Each part of a recovery is measured on this machine with the product's
own code, in the same run, and put together by stated assumptions. What grows with nodes or ranks (meeting again, process
groups, votes) is measured with 2 to 32 processes; beyond that everything is extrapolated by the curve a + b n + c n^2 (none of
them negative) through the medians, and called so. A second of a process's processor time counts as a second, for a node has
processors of its own, and two cores for 32 processes say nothing else; the store through which all talk is one thread, whose
time is added. `--quick`: up to 8 processes, smaller files.

`a_rank_dies`: a rank is killed, all nodes are there again. `a_node_is_lost`: the others wait until it counts as lost, and then
for a last call; the state's conversion to fewer ranks is not in it.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import log2
from pathlib import Path

import numpy as np
import torch

from benchmarks.figures import Figure, report
from benchmarks.programs.scale_processes import Together, gathered, joined
from benchmarks.recovery import campaign
from dlac_pipeline.checkpoint.files import StoreFiles, file_digest
from dlac_pipeline.checkpoint.manifest import FileEntry, verify_entries
from dlac_pipeline.launch_spec import LaunchSpec

_NODES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
_BAR_NODES, _BAR_S = 256, 45
_REPEATS = 3
Curve = Callable[[float], float]

RANKS_PER_NODE = 8
PARAMETERS = 1.5e9
BYTES_PER_PARAMETER = 14
"""bf16 weights, and in fp32 a copy of them and Adam's two moments."""
GROUPS = 4
"""Process groups of all ranks: the script's, and three of DLAC's (dlac_pipeline/worker.py)."""
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
SAID = (
    "a node has processors of its own, as fast as one here; the store's server is one thread",
    "all nodes verify the checkpoint, each its part, as the product does, at the rate measured here with two cores and the files "
    "in memory: the shared file system is as fast for all of them at once",
    "every rank reads its share of the checkpoint at the rate measured for one rank here, all at once: the file system does "
    "not slow down; accelerators and their own process groups cost nothing",
    "claim, start of ranks (forked), engine and first step take what they take in a small run here: the catalog answers "
    "all ranks at once as it answers two, and the model's first step is as short",
    "host names resolve at once: torch looks up the name of every peer when it connects, and a resolver that drops bursts costs "
    "5 s (found here with 20 processes and more: measured_store_connect, not in the model)",
    "the curve measured from 2 to 32 processes goes on",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The parts; seconds, and bytes per second."""

    fixed: Mapping[str, float]
    """Phases of recoveries of two ranks: their medians."""
    verify_rate: float
    file_s: float
    """Of a file, whatever is in it."""
    load_rate: float
    gather: Curve
    """Of the nodes: to meet again."""
    group: Curve
    """Of the ranks: to make a process group."""
    vote: Curve
    """Of the ranks: a vote up and the decision down."""


def main() -> None:
    """Measure the parts, put them together, and report."""
    quick = "--quick" in sys.argv[1:]
    counts = (2, 4, 8) if quick else (2, 4, 8, 16, 32)
    meetings = {count: _medians([gathered(count)["again"] for _ in range(_REPEATS)]) for count in counts}
    joins = {count: [joined(count, lazily=True) for _ in range(_REPEATS)] for count in counts}
    eager = {count: _medians([joined(count, lazily=False)["group"] for _ in range(_REPEATS)]) for count in counts}
    groups = {count: _medians([each["group"] for each in runs]) for count, runs in joins.items()}
    votes = {count: _medians([each["vote"] for each in runs]) for count, runs in joins.items()}
    print(json.dumps({"assumed": SAID, "loadavg": os.getloadavg()}), flush=True)
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
        gather=_meeting(meetings),
        group=_grows(groups),
        vote=_voting(votes),
    )
    figures = {f"assumed_{name}": Figure(value=value, unit=unit) for name, (value, unit) in ASSUMED.items()}
    figures |= _measured_figures(parts)
    for name, measured in (("gather", meetings), ("group", groups), ("group_by_default", eager), ("vote", votes)):
        figures |= _grown(name, measured)
    figures[f"groups_by_default_{_BAR_NODES}"] = Figure(
        value=GROUPS * _grows(eager)(RANKS_PER_NODE * _BAR_NODES), unit="s, extrapolated, not in the model"
    )
    figures["measured_store_connect"] = Figure(
        value=max(each["connect"].wall_s for each in joins[counts[-1]]),
        unit=f"s, {counts[-1]} processes at once, worst",
    )
    report("scale_model", figures | _modelled(parts, counts[-1]))


def _modelled(parts: Measured, most: int) -> dict[str, Figure]:
    """Both recoveries at every size, and at the one with a bar what the first consists of."""
    launch = LaunchSpec(script="")
    found = {}
    for nodes in _NODES:
        unit = "s" if RANKS_PER_NODE * nodes <= most else "s, extrapolated"
        phases = phases_at(parts, nodes)
        total = sum(phases.values())
        bar = f"<= {_BAR_S}" if nodes == _BAR_NODES else None
        found[f"a_rank_dies_{nodes}"] = Figure(value=total, unit=unit, bar=bar)
        lost = total - phases["detect"] + launch.node_timeout_s + launch.last_call_s
        found[f"a_node_is_lost_{nodes}"] = Figure(value=lost, unit=unit, bar=bar)
        if nodes == _BAR_NODES:
            found |= {f"{name}_{nodes}": Figure(value=value, unit=unit) for name, value in phases.items()}
            read_s = PARAMETERS * BYTES_PER_PARAMETER / (parts.verify_rate * nodes)
            left_s = _BAR_S - total + read_s + phases["load"] - parts.fixed["load_s"]
            per_byte = 1 / (parts.verify_rate * nodes) + 1 / (parts.load_rate * RANKS_PER_NODE * nodes)
            found[f"largest_checkpoint_within_{_BAR_S}_s_{nodes}"] = Figure(
                value=max(0.0, left_s) / per_byte / 1e9, unit="GB, extrapolated"
            )
    return found


def phases_at(parts: Measured, nodes: int) -> dict[str, float]:
    """Seconds of each phase after the death of a rank."""
    ranks = RANKS_PER_NODE * nodes
    size = PARAMETERS * BYTES_PER_PARAMETER
    return {
        "detect": parts.fixed["detect_s"],
        "stop": parts.fixed["stop_s"],
        "gather": parts.gather(nodes),
        "claim": parts.fixed["claim_s"],
        "verify": (size / parts.verify_rate + ASSUMED["files_per_rank"][0] * ranks * parts.file_s) / nodes
        + ASSUMED["told_and_answered"][0],
        "groups": GROUPS * parts.group(ranks),
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


def _grown(name: str, measured: dict[int, Together]) -> dict[str, Figure]:
    found: dict[str, Figure] = {}
    for count, each in measured.items():
        found |= {
            f"measured_{name}_{count}_wall": Figure(value=1e3 * each.wall_s, unit="ms on two cores"),
            f"measured_{name}_{count}_processor": Figure(value=1e3 * each.cpu_s, unit="ms of the busiest process"),
            f"measured_{name}_{count}_server": Figure(value=1e3 * each.server_cpu_s, unit="ms of the store"),
        }
    return found


def _meeting(measured: dict[int, Together]) -> Curve:
    """Waits between two looks, as the slowest meeting had them, and what all do through the store on top.

    A node reads what each other one said, twice, a request at a time.
    """
    waits_s = max(each.wall_s for each in measured.values())
    work = _grows(measured)
    return lambda nodes: waits_s + work(nodes) + 4 * nodes * ROUND_TRIP_S


def _voting(measured: dict[int, Together]) -> Curve:
    """A message per level up and down the tree, each as long as between two ranks; the root unpacks all votes."""
    hop_s = measured[2].wall_s / 2 + ROUND_TRIP_S / 2
    work = _curve({count: each.cpu_s for count, each in measured.items()})
    return lambda ranks: 2 * log2(ranks) * hop_s + work(ranks)


def _grows(measured: dict[int, Together]) -> Curve:
    """Processor time of the busiest process, and that of the store on top."""
    process = _curve({count: each.cpu_s for count, each in measured.items()})
    server = _curve({count: each.server_cpu_s for count, each in measured.items()})
    return lambda count: process(count) + server(count)


def _curve(measured: dict[int, float]) -> Curve:
    """The curve a + b n + c n^2 without negative parts that is nearest to what was measured."""
    counts, seconds = np.array([*measured], dtype=float), np.array([*measured.values()])
    fits = []
    for powers in (chosen for size in (1, 2, 3) for chosen in combinations((0, 1, 2), size)):
        basis = counts[:, None] ** np.array(powers)
        factors = np.linalg.lstsq(basis, seconds, rcond=None)[0]
        if (factors >= 0).all():
            fits.append((float(((basis @ factors - seconds) ** 2).sum()), powers, factors))
    _, powers, factors = min(fits, key=lambda fit: fit[0])
    return lambda count: float(sum(factor * count**power for power, factor in zip(powers, factors, strict=True)))


def _medians(runs: list[Together]) -> Together:
    return Together(
        wall_s=statistics.median(run.wall_s for run in runs),
        cpu_s=statistics.median(run.cpu_s for run in runs),
        server_cpu_s=statistics.median(run.server_cpu_s for run in runs),
    )


def _rates(folder: Path, size: int) -> tuple[float, float, float]:
    """Bytes per second that a node verifies, seconds per file on top, and bytes per second that a rank loads."""
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
    """The median of a few times, in seconds."""
    times = []
    for _ in range(_REPEATS):
        began = time.monotonic()
        work()
        times.append(time.monotonic() - began)
    return statistics.median(times)


if __name__ == "__main__":
    main()
