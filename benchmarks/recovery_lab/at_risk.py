"""Work at risk of a lost node, on networks of several rates, for `benchmarks/memory_recovery.py --nodes`. Nothing is killed.

Two nodes of one rank train 101 M parameters (a state of 1.2 GB). At each moment the work at risk is the age of the newest step
whose state all nodes and their buddies have. A token bucket (tbf) limits what each node sends, gradients included. The overhead
counts steps that keep a state, up to the end of the next one. A run without states shows what copies take from gradients.
"""

import subprocess
import threading
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.recovery_lab.nodes import NodesRun
from benchmarks.recovery_lab.stamps import Stamp, spent_on_states
from dlac_pipeline.memory_states import states
from tests.network_namespaces import NetworkNode
from tests.node_network import Network

RATES = {"10_gbit": "10gbit", "1_gbit": "1gbit"}
_FIRST_STEPS = 8
"""Steps until the policy knows what a state costs."""
_LOOK_S = 0.02


def measure_at_risk(network: Network, steps: int) -> dict[str, Figure]:
    """Train so many steps on each network."""
    figures: dict[str, Figure] = {}
    for name, rate in RATES.items():
        bare = _start(network, rate, keeps_states=False)
        bare.wait_for_steps(_FIRST_STEPS + steps // 2)
        bare.stop()
        run = _start(network, rate, keeps_states=True)
        found = _watch(run, steps)
        run.stop()
        found["step_over_bare"] = Figure(value=run.median_step_s() / bare.median_step_s(), unit="ratio")
        figures |= {f"risk_{name}_{figure}": value for figure, value in found.items()}
    return figures


def _start(network: Network, rate: str, *, keeps_states: bool) -> NodesRun:
    name = f"{'states' if keeps_states else 'bare'}-{rate}"
    run = NodesRun(network, name, nodes=2, ranks=1, spares=0, large=True, keeps_states=keeps_states)
    for node in run.joined:
        limit_rate(node, rate)
    return run


def limit_rate(node: NetworkNode, rate: str) -> None:
    """Limit what a node sends."""
    command = ["tc", "-n", node.name, "qdisc", "add", "dev", "eth0", "root", "tbf"]
    subprocess.run([*command, "rate", rate, "burst", "4mb", "latency", "100ms"], check=True)


def _watch(run: NodesRun, steps: int) -> dict[str, Figure]:
    copied_at: dict[int, float] = {}
    ended = threading.Event()
    thread = threading.Thread(target=_look, args=(run, copied_at, ended))
    run.wait_for_steps(_FIRST_STEPS)
    thread.start()
    run.wait_for_steps(steps)
    ended.set()
    thread.join()
    stamps = run.read_stamps(after=_FIRST_STEPS)
    done = {each.step: each.done for each in run.read_stamps()}
    begun = sorted(step for step in copied_at if step in done)
    spent, total = spent_on_states(stamps, set(begun)), stamps[-1].done - stamps[0].done
    overhead = max(0.0, sum(spent)) / total
    return {
        "at_risk_s": Figure(value=_at_risk_s(copied_at, done, stamps), unit="s", bar="<= 10"),
        "overhead": Figure(value=overhead, unit="share of the time", bar="<= 0.01"),
        "states": Figure(value=len(begun), unit="states"),
        "step_s": Figure(value=total / (len(stamps) - 1), unit="s"),
    }


def _at_risk_s(copied_at: Mapping[int, float], done: Mapping[int, float], stamps: list[Stamp]) -> float:
    """Return the largest age of the newest copied step, up to the last step."""
    copied = [step for step in sorted(copied_at) if step in done]
    moments = [*(copied_at[step] for step in copied), stamps[-1].done]
    return max((later - done[step] for step, (_, later) in zip(copied, pairwise(moments), strict=True)), default=0.0)


def _look(run: NodesRun, copied_at: dict[int, float], ended: threading.Event) -> None:
    """Note when a step's state was first seen on all nodes and their buddies."""
    while not ended.wait(_LOOK_S):
        with suppress(OSError, ValueError, IndexError):  # the run begins, or a mark is being replaced
            marks = [mark for node in run.joined for mark in _marks_of(run, node)]
            if len(marks) == run.nodes:
                step, at = min((int(mark.read_text()), mark.stat().st_mtime) for mark in marks)
                if 0 < step < states.ALWAYS:
                    copied_at.setdefault(step, max(at, *(mark.stat().st_mtime for mark in marks)))


def _marks_of(run: NodesRun, node: NetworkNode) -> list[Path]:
    """Return the marks of the last copied step in a node's shared memory, which its processes see."""
    pid = run.network.launches[node].of("attempt")[-1]["pids"][0]
    folder = states.memory_folder(run.spec)
    assert folder is not None
    return sorted(Path(f"/proc/{pid}/root{folder}").glob("*/copied.*"))
