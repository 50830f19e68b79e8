"""Recovery time by failure: `python -m benchmarks.failures [--quick] [--state-mb N] [--rounds N]`.

Two ranks train a small model whose state has 1 GB: a frozen table makes it so large, and costs no time in steps. A rank is
killed (single), or all ranks at once (concurrent), or a rank, and twice more a rank during the recovery, before the first new
step (cascading). One run resumes from states in memory, one every 50 steps, with an asynchronous checkpoint every 6 s. The
other has no states in memory, and resumes from the store, with a synchronous checkpoint every 4 s. The last
attempt of a cascade reads the store in both only if two attempts died while they loaded the state.

A recovery is the time from the kill, the last one of a cascade, to the first new step, with the steps that are repeated. The
restart is the time to any step. Each failure comes up to a second after a state was kept. Rows replayed are those of steps that
were finished twice. An undisturbed run follows, whose losses must be the same, bit by bit.
"""

import argparse
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import Figure, report
from benchmarks.recovery_lab.memory_run import MemoryRun, Size
from benchmarks.recovery_lab.training import make_source
from dlac_pipeline.audit.audit import audit_run

SOURCES = ("memory", "store")
FAILURES = ("single", "concurrent", "cascading")
_CASCADE = 3
_PHASES = (
    "from_memory",
    "detect_s",
    "stop_s",
    "claim_s",
    "verify_s",
    "load_s",
    "first_step_s",
    "total_s",
    "rows_replayed",
)
_EVERY_S = 4.0
"""Seconds of training between two checkpoints of the run that resumes from the store."""
_LIMIT_S = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovery:
    """The recovery from one failure."""

    restart_s: float
    """From the last kill to the next step."""
    recovery_s: float
    """From the last kill to the first new step."""
    rows_replayed: int
    from_memory: bool


Recoveries = Mapping[str, Sequence[Recovery]]
"""Of each failure, its recoveries."""


def main() -> None:
    """Kill, compare, and report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="each failure once")
    parser.add_argument("--state-mb", type=int, default=1_000, help="size of the frozen table (MB)")
    parser.add_argument("--rounds", type=int, default=0, help="each failure so often, instead of the usual number")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="dlac-failures-") as home:
        figures = measure(Path(home), chosen.state_mb * 10**6, chosen.rounds or (1 if chosen.quick else 5))
    figures["load_average_1min"] = Figure(value=os.getloadavg()[0], unit="processes")
    report("failures", figures)


def measure(home: Path, table_bytes: int, rounds: int) -> dict[str, Figure]:
    """Let a run fail in each way, from memory and from the store, and compare it with an undisturbed one."""
    size = Size(
        hidden=256, layers=1, batch=64, memory_steps=50, checkpoint_s=6, kills=0, quick_kills=0, sharded=False, calm_steps=0,
        recovery_bar="", table_bytes=table_bytes,
    )  # fmt: skip
    lakehouse = make_source(home)
    runs: list[MemoryRun] = []
    figures: dict[str, Figure] = {}
    for source in SOURCES:
        run = MemoryRun(home, source, size, keeps_checkpoints=True, cascade=_CASCADE)
        if source == "store":
            own = replace(size, checkpoint_s=_EVERY_S)
            run = MemoryRun(home, source, own, memory="", keeps_checkpoints=True, cascade=_CASCADE)
        with run.running():
            found = _fail(run, rounds, random.Random(7))
        runs.append(run)
        figures |= {f"{source}_{name}": figure for name, figure in figures_of(found).items()}
        shown = {kind: [asdict(each) for each in recoveries] for kind, recoveries in found.items()}
        print(json.dumps({"source": source, "recoveries": shown}), flush=True)
    once = replace(size, checkpoint_s=3600)
    calm = MemoryRun(home, "calm", once, steps=max(run.last_step for run in runs), memory="", keeps_checkpoints=True)
    with calm.running(to_the_end=True):
        pass
    undisturbed = calm.losses()
    for source, run in zip(SOURCES, runs, strict=True):
        losses = run.losses()
        differing = sum(one != other for one, other in zip(losses, undisturbed, strict=False))
        figures |= {
            f"{source}_losses_differing": Figure(value=differing, unit="steps", bar="<= 0"),
            f"{source}_losses_compared": Figure(value=min(len(losses), len(undisturbed)), unit="steps"),
            f"{source}_exact": Figure(value=audit_run(lakehouse, source).exact, unit="of 1", bar=">= 1"),
        }
    return {
        "state_bytes": Figure(value=calm.checkpoint_bytes, unit="bytes"),
        "step_s": Figure(value=_step_s(calm), unit="s"),
        **figures,
    }


def _fail(run: MemoryRun, rounds: int, chance: random.Random) -> dict[str, list[Recovery]]:
    found: dict[str, list[Recovery]] = {kind: [] for kind in FAILURES}
    _wait(lambda: run.checkpoint_bytes > 0, "a checkpoint")
    for _ in range(rounds):
        for kind in FAILURES:
            _wait(partial(_has_state, run, run.last_step), "a state of a later step")
            time.sleep(chance.uniform(0.0, 1.0))
            found[kind].append(_recover(run, kind, chance))
            print(json.dumps({"failure": kind, **{name: run.recovered[-1][name] for name in _PHASES}}), flush=True)
    return found


def _has_state(run: MemoryRun, after: int) -> bool:
    return max(run.saved_at, default=0) > after


def _recover(run: MemoryRun, kind: str, chance: random.Random) -> Recovery:
    """Kill as the failure says, and wait for the first new step."""
    before = _repeated(run)
    for _ in range(_CASCADE - 1 if kind == "cascading" else 0):
        _kill_during_recovery(run, chance)
    known = len(run.recovered)
    restart_s, recovery_s = run.kill(None if kind == "concurrent" else chance.choice(run.ranks()))
    _wait(lambda: len(run.recovered) > known, "the report of the recovery")
    return Recovery(
        restart_s=restart_s,
        recovery_s=recovery_s,
        rows_replayed=(_repeated(run) - before) * run.size.batch,
        from_memory=run.recovered[-1]["from_memory"],
    )


def _kill_during_recovery(run: MemoryRun, chance: random.Random) -> None:
    """Kill a rank, and wait until the ranks of the next attempt have been started and are loading the state.

    Raises:
        RuntimeError: they had finished a new step already.
    """
    ranks = run.ranks()
    os.kill(chance.choice(ranks), signal.SIGKILL)
    _wait(lambda: run.ranks() != ranks, "another attempt")
    time.sleep(chance.uniform(0.0, 0.1))
    before = max(line.step for line in run.lines() if line.pid not in run.ranks())
    if run.last_step > before:
        raise RuntimeError(
            f"expected a kill before the first step after {before}, found step {run.last_step}: take more --state-mb"
        )


def _wait(is_true: Callable[[], bool], awaited: str) -> None:
    deadline = time.monotonic() + _LIMIT_S
    while not is_true():
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {awaited} within {_LIMIT_S:.0f} s, found none")
        time.sleep(0.01)


def _repeated(run: MemoryRun) -> int:
    """Return how many finished steps were repetitions."""
    steps = [line.step for line in run.lines()]
    return len(steps) - len(set(steps))


def _step_s(run: MemoryRun) -> float:
    ends = [line.done for line in run.lines()]
    return statistics.median(after - before for before, after in pairwise(ends))


def figures_of(found: Recoveries) -> dict[str, Figure]:
    """Return the medians of each failure's recoveries, and the longest recovery."""
    figures: dict[str, Figure] = {}
    for kind, recoveries in found.items():
        seconds = [each.recovery_s for each in recoveries]
        figures |= {
            f"{kind}_recovery_s": Figure(value=statistics.median(seconds), unit="s"),
            f"{kind}_recovery_most_s": Figure(value=max(seconds), unit="s"),
            f"{kind}_restart_s": Figure(value=statistics.median(each.restart_s for each in recoveries), unit="s"),
            f"{kind}_rows_replayed": Figure(
                value=statistics.median(each.rows_replayed for each in recoveries), unit="rows"
            ),
            f"{kind}_failures": Figure(value=len(recoveries), unit="failures"),
            f"{kind}_from_memory": Figure(value=sum(each.from_memory for each in recoveries), unit="failures"),
        }
    return figures


if __name__ == "__main__":
    main()
