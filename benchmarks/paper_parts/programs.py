"""The paper's other experiments: programs of this folder, and what the paper says of each."""

import sys
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu_parts.node import run_program

_LIMIT_S = 1_200.0
"""Seconds after which a program counts as failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A program whose figures answer a claim of the paper."""

    title: str
    paper: str
    """What the paper says, in its words or numbers."""
    about: str = ""
    """What its figures do not say of the measurement."""
    modelled: str = ""
    """What of it is not measured but modelled."""
    quick: bool = True
    """Its short run. False: the claim needs the full size."""
    arguments: tuple[str, ...] = ()
    sides: tuple[str, ...] = ()
    """Begins or ends of the names of figures that make one table, with a column for each."""

    def command(self, name: str) -> tuple[str, ...]:
        """Return the arguments of `python` that run it."""
        return ("-m", f"benchmarks.{name}", *(("--quick",) if self.quick else ()), *self.arguments)


PROGRAMS = {
    "recovery": Program(
        title="Recovery from the loss of a rank, beside a bare relaunch",
        paper="256 nodes recover from the loss of one in under 45 s; epoch-based restarts take minutes (4.3)",
        about="Two kills per side, of one of two ranks with 1.1 M parameters. States in memory are off. The first step may "
        "repeat one that was finished",
        modelled="both ranks are on one node, and the store is a folder of it",
        sides=("forked", "spawned", "bare"),
    ),
    "memory_recovery": Program(
        title="Recovery from states in memory, and work at risk",
        paper="a recovery point objective below 30 s at an overhead below 2 % (5.1)",
        about="Six kills with 1.1 M parameters and two with 100 M, in turn of a rank and of all ranks",
        modelled="all ranks of a node are killed in place of the node: its shared memory and the supervisor survive",
        arguments=("--sizes", "1.1M", "100M"),
        sides=("1.1M", "100M"),
    ),
    "failures": Program(
        title="Recovery time by failure, with a state of 1 GB",
        paper='scenarios "including single node failures, concurrent multi-node failures, and cascading failures" (5.1)',
        about="A cascade kills a rank, and twice more a rank during the recovery. When this was measured, an attempt from "
        "memory that died before its first step was followed by one from the store, so the last attempt of a cascade read "
        "the store in both runs. By now two deaths in the load are needed for that. Times are"
        " from the last kill. Each kill comes up to a second after a state was kept, so little is repeated. Limits of"
        " failures without progress are raised. Each failure was made once, so a figure has no spread",
        modelled="processes of one node in place of nodes: shared memory and the supervisor survive, a death is noticed at "
        "once, and the store is a folder of this node. A frozen table makes the state of a small model large",
        sides=tuple(
            f"{source}_{kind}" for source in ("memory", "store") for kind in ("single", "concurrent", "cascading")
        ),
    ),
    "intervals": Program(
        title="Overhead against work at risk, by checkpoint interval",
        paper="recovery point objectives below 30 s at an overhead below 2 %, for frequent checkpoints (5.1)",
        about="At risk is the longest time from the moment of a state to the next commit. A failure just before it loses so"
        " much. An overhead is judged only if blocks without checkpoints differ from each other by less than 2 %",
        modelled="columns named so: the cost of a checkpoint over the interval, and the interval plus the longest commit",
        arguments=("--intervals", "5", "10", "30", "--pairs", "3", "--model", "99M"),
        sides=("5s", "10s", "30s", "modelled_60s", "modelled_300s", "modelled_auto"),
    ),
    "resume": Program(
        title="Positioning: from resuming to the first batch",
        paper="tracking saves 87.3 % of the positioning (5.1)",
        about="The table has 1,000 row groups of 8 MB in the page cache. Seconds to the first batch are medians "
        "of 10, those of a replay the lesser of two",
        modelled="one rank on one node. The table is a folder of it",
        quick=False,
        sides=("in_order", "shuffled"),
    ),
    "state": Program(
        title="Size of the reader's state",
        paper="35 to 45 MB for 10 TB and 128 workers (4.1)",
        about="Bytes of the states of one reader, once: they are the same in each call",
        modelled="the table of 10 TB: its units are synthetic, the code is that of a run",
        quick=False,
    ),
    "overhead": Program(
        title="Cost of tracking",
        paper="0.3 to 1.0 % of the training time (4.2)",
        about="Two ranks of 330 k parameters, in alternated segments with and without tracking. States in memory are off: their "
        "cost is in the section on recoveries from them",
        modelled="steps of 10, 50 and 500 ms: each rank computes until so much time has passed. The shortest step is longer",
        arguments=("--step-ms", "10", "50", "500"),
        sides=("g64", "g1024", "10ms", "50ms", "500ms"),
    ),
    "checkpoint": Program(
        title="Storage in addition to checkpoints without DLAC",
        paper="0.1 to 0.2 % (4.2)",
        about="A checkpoint without DLAC has the weights and the optimizer's state, three times the weights alone. The "
        "ledger is counted with all its metadata after a few commits, and 1,024 key groups advance in each",
        arguments=("--storage",),
    ),
    "coordination": Program(
        title="Coordination of a checkpoint",
        paper="hierarchical, O(log n) in place of O(n) (4.2)",
        about="Seconds of a checkpoint's messages. Other figures are counts, the same in each call",
        modelled="each message takes 20 ms; 4,096 ranks are extrapolated",
    ),
    "control_plane": Program(
        title="Recovery as nodes are added (weak scaling)",
        paper="near-constant recovery time regardless of cluster size (5.3)",
        about="One node that does not lead is killed, once for each number of nodes. Each time contains the intended waits of "
        "`node_timeout_s` and `last_call_s`",
        modelled="all nodes are processes of one machine, and their ranks are stubs without PyTorch",
        arguments=("--nodes", "8", "32", "128", "256"),
        sides=("one_8", "one_32", "one_128", "one_256"),
    ),
    "traffic": Program(
        title="Bytes over the network, in normal operation and per recovery",
        paper="erasure-coded storage elsewhere reduces traffic by a factor of 5 (3.3)",
        about="Three kills of a rank of four. A recovery is the difference to a run without kills. Three groups send less than "
        "four, so it can be negative",
        modelled="four ranks are on one network namespace, catalog and store on another one",
        sides=("relaunch", "memory", "per_step"),
    ),
}


def measure_program(name: str) -> dict[str, Any]:
    """Run a program. Return its figures, or why it failed."""
    try:
        found = run_program([sys.executable, *PROGRAMS[name].command(name)], limit_s=_LIMIT_S)
        return {"figures": found["figures"]}
    except (RuntimeError, ValueError, LookupError) as err:
        lines = str(err).splitlines() or [repr(err)]
        return {"failed": lines[-1]}
