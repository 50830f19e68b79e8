"""From SIGKILL to the next step, by states in memory: `python -m benchmarks.memory_recovery [--quick] [--kills N] [--sizes X]`.

`--nodes` measures several nodes instead, each a network namespace with shared memory of its own. It needs root, iproute2 and
PostgreSQL. Two nodes of two ranks train the smallest model. By turns a rank, all ranks of a node, or a node is killed, and a
spare takes the place of the node. Then nodes are lost with their buddies in a run of three: it reads the store. The work at risk
of 100 M parameters is measured on networks of two rates (`recovery_lab/at_risk.py`).

`--dlrover` compares with DLRover's flash checkpoint instead, on one node. It makes an environment for it on the first run.

Two ranks train a model of 1.1 M parameters (replicated), of 100 M, or of 400 M (FSDP2; its state has 4.8 GB), or a small one
with a frozen table of 5 GB (FSDP2). In turns a rank is killed, or all ranks of the node. The restart is the time to the next
step, and the recovery that to a step beyond the last one before the kill. The files of each checkpoint are destroyed once it is
committed: a recovery that read one would fail. An undisturbed run of as many steps follows, whose losses must be the same. Work
at risk is the longest time between two states. Overhead is the time of steps that keep a state, up to the end of the next step,
beyond the median of other steps, as a share of all steps. Both are of the undisturbed run. Steps are timed by the ranks, kills by
this process.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.recovery_lab.at_risk import measure_at_risk
from benchmarks.recovery_lab.dlrover import COURSES, compare_with_dlrover
from benchmarks.recovery_lab.memory_run import SIZES, MemoryRun, Size
from benchmarks.recovery_lab.nodes import measure_nodes, open_source_network
from benchmarks.recovery_lab.training import make_source
from dlac_pipeline.audit.audit import audit_run
from dlac_pipeline.lakehouse.ledger.ledger import Ledger
from dlac_pipeline.lakehouse.ledger.typed_rows import ClaimRow

_PHASES = ("detect_s", "stop_s", "claim_s", "verify_s", "load_s", "first_step_s", "total_s")


def main() -> None:
    """Kill, compare, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kills", type=int, default=0, help="At each size, instead of the usual number.")
    parser.add_argument("--sizes", nargs="*", default=list(SIZES), choices=SIZES)
    parser.add_argument(
        "--nodes", action="store_true", help="Several nodes instead. --kills is the number of all kills."
    )
    parser.add_argument("--dlrover", action="store_true", help=f"Compare with DLRover instead: {', '.join(COURSES)}.")
    chosen = parser.parse_args()
    figures: dict[str, Figure] = {}
    if chosen.nodes:
        kills, pairs, steps = (6, 1, 20) if chosen.quick else (300, 5, 100)
        figures = measure_nodes(chosen.kills or kills, pairs)
        with open_source_network() as network:
            figures |= measure_at_risk(network, steps)
    for name in [name for name in chosen.sizes if name in COURSES] if chosen.dlrover else ():
        with tempfile.TemporaryDirectory(prefix="dlac-memory-dlrover-") as home:
            course = COURSES[name]
            kills = chosen.kills or (course.quick_kills if chosen.quick else course.kills)
            figures |= compare_with_dlrover(name, Path(home), kills)
    for name in () if chosen.nodes or chosen.dlrover else chosen.sizes:
        size = SIZES[name]
        with tempfile.TemporaryDirectory(prefix="dlac-memory-") as home:
            kills = chosen.kills or (size.quick_kills if chosen.quick else size.kills)
            figures |= measure_size(name, size, Path(home), kills)
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("memory_recovery", figures)


def measure_size(name: str, size: Size, home: Path, kills: int, **settings: Any) -> dict[str, Figure]:
    """Kill a run so often, and compare it with an undisturbed one. `settings` are those of `MemoryRun`."""
    lakehouse = make_source(home)
    killed = MemoryRun(home, "killed", size, **settings)
    found: dict[str, list[float]] = {"rank": [], "node": []}
    restarts: dict[str, list[float]] = {"rank": [], "node": []}
    chance = random.Random(7)
    with killed.running():
        killed.wait_for_steps(4)
        for number in range(kills):
            time.sleep(chance.uniform(0.0, 0.5))
            kind = ("rank", "node")[number % 2]
            restart_s, recovery_s = killed.kill(chance.choice(killed.ranks()) if kind == "rank" else None)
            restarts[kind].append(restart_s)
            found[kind].append(recovery_s)
            killed.wait_for_steps(3)
    steps = max(size.calm_steps, killed.last_step)
    calm = MemoryRun(home, "calm", size, steps=steps, **settings)
    with calm.running(to_the_end=True):
        pass
    print(json.dumps({"size": name, "recovery_s": found}), flush=True)
    losses, undisturbed = (each.losses() for each in (killed, calm))
    claims = [row for row in Ledger(lakehouse).rows("killed", kinds=(ClaimRow,)) if row.replaces]
    figures = {
        f"{name}_{kind}_restart_s": Figure(value=statistics.median(values), unit="s")
        for kind, values in restarts.items()
        if values
    }
    figures |= {
        f"{name}_{kind}_recovery_{which}s": Figure(value=summary(values), unit="s", bar=bar)
        for kind, values in found.items()
        for which, summary, bar in (("", statistics.median, size.recovery_bar), ("most_", max, None))
        if values
    }
    replayed = max(each["rows_replayed"] for each in killed.recovered) / size.batch
    figures |= {
        f"{name}_kills": Figure(value=kills, unit="kills"),
        f"{name}_from_memory": Figure(
            value=sum(row.memory_of > 0 for row in claims), unit="recoveries", bar=f">= {kills}"
        ),
        f"{name}_replayed": Figure(value=replayed, unit="batches", bar="<= 2"),
        f"{name}_losses_differing": Figure(
            value=sum(one != other for one, other in zip(losses, undisturbed, strict=False)), unit="steps", bar="<= 0"
        ),
        f"{name}_losses_compared": Figure(value=min(len(losses), len(undisturbed)), unit="steps"),
        f"{name}_exact": Figure(value=audit_run(lakehouse, "killed").exact, unit="of 1", bar=">= 1"),
        **{
            f"{name}_{phase}": Figure(value=statistics.median(each[phase] for each in killed.recovered), unit="s")
            for phase in _PHASES
        },
    }
    return figures if not size.calm_steps else figures | calm.costs(name, is_chosen=not size.memory_steps)


if __name__ == "__main__":
    main()
