"""Global recovery, from SIGKILL of a launch to its first new optimizer step: `python -m benchmarks.recovery_daemon [--quick]`.

Like benchmarks/recovery.py, but the starter of the two ranks is killed with them. With DLAC the process of the Dagster run starts
another supervisor. The other side is a Dagster job whose only op runs `torchrun` on the same script with DeepSpeed's own resume,
which reads from the first row. The op asks Dagster for a retry in the same process (`RetryRequested`), and Dagster's run retries
start a run again that fails. The process of the Dagster run stays alive on both sides: plain Dagster does not start a run again
whose process is lost.

Plain Dagster can fail to recover at all, for a reason that was not found: its run makes no step for `_GIVES_UP_S`. Then the round
ends for that side, and `bare_stuck` counts it. Such a kill is in no median.

A third side has no counterpart: the Dagster run's process is killed too. A real dagster-daemon then fails the run, and its
sensor requests the recovery. The sides alternate, with a few kills each, timed from outside.
"""

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import psutil
import yaml

from benchmarks.figures import Figure, report
from benchmarks.programs.recovery_sizes import EVERY_STEPS
from benchmarks.recovery_lab.comparison import compare_with_bare
from benchmarks.recovery_lab.training import PROGRAMS, RANKS, job, make_source, source_files, steps_after
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, recoveries_of
from dlac_pipeline.spec.job_spec import parse_spec
from examples.demo.local_dagster import LocalDagster

_DAEMON = "daemon"
_SIDES = ("dlac", "bare", _DAEMON)
_LOOKS_EVERY_S = 5.0
"""Interval in which a daemon looks for ended runs."""
_GIVES_UP_S = 120.0
_PLAIN_SCRIPT = "recovery_bare.py"
_PHASES = ("detect_s", "schedule_s", "stop_s", "claim_s", "verify_s", "load_s", "first_step_s")


def main() -> None:
    """Kill in turn, and report."""
    rounds, kills = (1, 2) if "--quick" in sys.argv[1:] else (4, 5)
    measured: dict[str, list[float]] = {side: [] for side in _SIDES}
    recovered: dict[str, list[Recovery]] = {side: [] for side in _SIDES}
    stuck = 0
    for number in range(rounds):
        for side in _SIDES:
            with tempfile.TemporaryDirectory(prefix="dlac-recovery-") as home:
                lakehouse = make_source(Path(home))
                found = campaign(lakehouse, Path(home), side, kills, random.Random(number))
                recovered[side] += [] if side == "bare" else recoveries_of(lakehouse)
            measured[side] += found
            stuck += side == "bare" and len(found) < kills
            print(json.dumps({"side": side, "recovery_s": found}), flush=True)
    by_daemon = measured.pop(_DAEMON)
    figures = compare_with_bare(measured, "dlac", most=1.15)
    figures["bare_stuck"] = Figure(value=stuck, unit=f"of {rounds} rounds")
    figures[f"{_DAEMON}_s"] = Figure(value=statistics.median(by_daemon), unit="s")
    for side, phase in product(("dlac", _DAEMON), _PHASES):
        values = [getattr(one, phase) or 0.0 for one in recovered[side]]
        figures[f"{side}_{phase}"] = Figure(value=statistics.median(values), unit="s")
    report("recovery_daemon", figures)


def campaign(lakehouse: Lakehouse, home: Path, side: str, kills: int, chance: random.Random) -> list[float]:
    """Return the seconds from each kill to the first new step. Fewer than `kills` if the plain side makes no step any more."""
    stamps, found = home / "stamps", []
    dagster, start = _bare(home, source_files(lakehouse)) if side == "bare" else _under_dlac(home)
    with dagster.running():
        run_id = start()
        steps_after(stamps, 0.0, 2 * EVERY_STEPS)
        for _ in range(kills):
            launch = _launch_of(stamps)
            time.sleep(chance.uniform(0.0, _LOOKS_EVERY_S))  # so that kills have no fixed phase to either side's daemon
            _wait_between_checkpoints(stamps)
            _kill([launch[0].parent() or launch[0], *launch] if side == _DAEMON else launch)
            killed_at, killed = time.time(), {process.pid for process in launch}
            try:
                found.append(steps_after(stamps, killed_at, 1, not_by=killed, within_s=_GIVES_UP_S) - killed_at)
            except TimeoutError:
                if side != "bare":
                    raise
                break
            steps_after(stamps, killed_at, 2 * EVERY_STEPS, not_by=killed)
        launch = _plain_processes(home) if side == "bare" else _launch_of(stamps)
        _cancel(dagster, run_id)
        _kill(launch)  # a cancelled torchrun leaves its ranks running
    return found


def _plain_processes(home: Path) -> list[psutil.Process]:
    """Return the plain side's torchrun and its ranks, whether they train or are stuck."""
    commands = ((process, " ".join(process.info["cmdline"] or ())) for process in psutil.process_iter(["cmdline"]))
    return [process for process, command in commands if _PLAIN_SCRIPT in command and str(home) in command]


def _launch_of(stamps: Path) -> list[psutil.Process]:
    """Return the processes below the Dagster run's process, from the launcher to the ranks, by the last step's rank 0."""
    rank = psutil.Process(int(stamps.read_text().splitlines()[-1].split()[0]))
    above = [rank, *rank.parents()]
    names = [" ".join(process.cmdline()) for process in above]
    launcher = next(
        process
        for process, name in zip(above, names, strict=True)
        if "dlac_pipeline.extensions.clusters.supervisor_process" in name or "torch.distributed.run" in name
    )
    return [launcher, *launcher.children(recursive=True)]


def _wait_between_checkpoints(stamps: Path) -> None:
    """Return after the first step after a checkpoint: plain DeepSpeed cannot always load one that a kill interrupted."""
    while int(stamps.read_text().splitlines()[-1].split()[1]) % EVERY_STEPS != 1:
        time.sleep(0.001)


def _kill(launch: list[psutil.Process]) -> None:
    for process in launch:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _cancel(dagster: LocalDagster, first: str) -> None:
    """End the training, as the button in the UI does."""
    with dagster.instance() as instance:
        running = [run.run_id for run in instance.get_runs() if not run.is_finished] or [first]
    for run_id in running:
        dagster.cancel(run_id)
        dagster.wait(run_id)


def _under_dlac(home: Path) -> tuple[LocalDagster, Callable[[], str]]:
    """Return a Dagster with DLAC, and the start of the training run."""
    spec = parse_spec(job(home / "stamps", start="fork"), origin="the benchmark").resolved(home)
    dagster = LocalDagster(home)
    dagster.write_job_file(spec)
    return dagster, partial(dagster.train, spec.run)


def _bare(home: Path, files: list[str]) -> tuple[LocalDagster, Callable[[], str]]:
    """Return a Dagster that retries runs, and the start of the training run."""
    workspace = home / "workspace.yaml"
    workspace.write_text(yaml.safe_dump({"load_from": [{"python_file": str(PROGRAMS / "recovery_dagster.py")}]}))
    dagster = LocalDagster(
        home,
        workspace=workspace,
        settings={
            "run_coordinator": {
                "module": "dagster",
                "class": "QueuedRunCoordinator",
                "config": {"dequeue_interval_seconds": 1},
            },
            "run_retries": {"enabled": True, "max_retries": 1_000},
        },
    )
    arguments = [str(home / "plain"), str(home / "stamps"), *files]
    script = {"ranks": RANKS, "script": str(PROGRAMS / _PLAIN_SCRIPT), "arguments": arguments}
    return dagster, partial(dagster.launch, "bare_job", {"ops": {"train": {"config": script}}})


if __name__ == "__main__":
    main()
