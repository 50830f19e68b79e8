"""Global recovery, from SIGKILL of a launch to its first new optimizer step: `python -m benchmarks.recovery_daemon [--quick]`.

As benchmarks/recovery.py, but what starts the two ranks is killed with them. Under DLAC the process of the Dagster run starts
another supervisor. Beside it a Dagster job whose only op runs `torchrun` on the same script with DeepSpeed's own resume, which
reads rows from the first on; Dagster's run retries start it again. The process of the Dagster run stays alive on both sides:
nothing in plain Dagster starts a run again whose process is gone.

A third side has no counterpart: the Dagster run's process is killed as well. A real dagster-daemon then fails the run, and its
sensor requests `recover_job`. The sides take turns, a few kills each, timed from outside.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from itertools import product
from pathlib import Path

import psutil
import yaml

from benchmarks.figures import Figure, report
from benchmarks.programs.recovery_sizes import EVERY_STEPS
from benchmarks.recovery_lab.beside import beside_bare
from benchmarks.recovery_lab.training import PROGRAMS, RANKS, job, make_source, source_files, steps_behind
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery, recoveries_of
from dlac_pipeline.spec.job_spec import parse_spec
from jobs.local_dagster import LocalDagster

_DAEMON = "daemon"
_SIDES = ("dlac", "bare", _DAEMON)
_LOOKS_EVERY_S = 5.0
"""How often a daemon looks for runs that have ended."""
_PHASES = ("detect_s", "schedule_s", "stop_s", "claim_s", "verify_s", "load_s", "first_step_s")


def main() -> None:
    """Kill in turn, and report."""
    rounds, kills = (1, 2) if "--quick" in sys.argv[1:] else (4, 5)
    measured: dict[str, list[float]] = {side: [] for side in _SIDES}
    recovered: dict[str, list[Recovery]] = {side: [] for side in _SIDES}
    for number in range(rounds):
        for side in _SIDES:
            with tempfile.TemporaryDirectory(prefix="dlac-recovery-") as home:
                lakehouse = make_source(Path(home))
                found = campaign(lakehouse, Path(home), side, kills, random.Random(number))
                recovered[side] += [] if side == "bare" else recoveries_of(lakehouse)
            measured[side] += found
            print(json.dumps({"side": side, "recovery_s": found}), flush=True)
    by_daemon = measured.pop(_DAEMON)
    figures = beside_bare(measured, "dlac", most=1.15)
    figures[f"{_DAEMON}_s"] = Figure(value=statistics.median(by_daemon), unit="s")
    for side, phase in product(("dlac", _DAEMON), _PHASES):
        values = [getattr(one, phase) or 0.0 for one in recovered[side]]
        figures[f"{side}_{phase}"] = Figure(value=statistics.median(values), unit="s")
    report("recovery_daemon", figures)


def campaign(lakehouse: Lakehouse, home: Path, side: str, kills: int, chance: random.Random) -> list[float]:
    """Seconds from each kill to the first new step."""
    stamps, found = home / "stamps", []
    dagster, started, config = _bare(home, source_files(lakehouse)) if side == "bare" else _under_dlac(home)
    with dagster.running():
        run_id = dagster.launch(started, config)
        steps_behind(stamps, 0.0, 2 * EVERY_STEPS)
        for _ in range(kills):
            launch = _launch_of(stamps)
            time.sleep(chance.uniform(0.0, _LOOKS_EVERY_S))  # so that kills are in step with neither side's daemon
            _wait_between_checkpoints(stamps)
            _kill([launch[0].parent() or launch[0], *launch] if side == _DAEMON else launch)
            killed_at, killed = time.time(), {process.pid for process in launch}
            found.append(steps_behind(stamps, killed_at, 1, not_by=killed) - killed_at)
            steps_behind(stamps, killed_at, 2 * EVERY_STEPS, not_by=killed)
        launch = _launch_of(stamps)
        _cancel(dagster, run_id)
        _kill(launch)  # torchrun, cancelled, leaves its ranks behind
    return found


def _launch_of(stamps: Path) -> list[psutil.Process]:
    """What the process of the Dagster run has started, from the launcher down to the ranks, by way of rank 0 of the last step."""
    rank = psutil.Process(int(stamps.read_text().splitlines()[-1].split()[0]))
    above = [rank, *rank.parents()]
    names = [" ".join(process.cmdline()) for process in above]
    launcher = next(
        process
        for process, name in zip(above, names, strict=True)
        if "dlac_pipeline.launchers.supervisor_process" in name or "torch.distributed.run" in name
    )
    return [launcher, *launcher.children(recursive=True)]


def _wait_between_checkpoints(stamps: Path) -> None:
    """Return just after the first step behind a checkpoint: plain DeepSpeed does not always load one that a kill cut short."""
    while int(stamps.read_text().splitlines()[-1].split()[1]) % EVERY_STEPS != 1:
        time.sleep(0.001)


def _kill(launch: list[psutil.Process]) -> None:
    for process in launch:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _cancel(dagster: LocalDagster, first: str) -> None:
    """End what trains, as the button in the UI does."""
    with dagster.instance() as instance:
        running = [run.run_id for run in instance.get_runs() if not run.is_finished] or [first]
    for run_id in running:
        dagster.cancel(run_id)
        dagster.wait(run_id)


def _under_dlac(home: Path) -> tuple[LocalDagster, str, dict[str, object]]:
    """Dagster with DLAC, the job and its configuration."""
    spec = parse_spec(job(home / "stamps", start="fork"), origin="the benchmark").resolved(home)
    raw = spec.model_dump(mode="json", exclude_none=True)
    return LocalDagster(home), "train_job", {"resources": {"job": {"config": {"spec": raw}}}}


def _bare(home: Path, files: list[str]) -> tuple[LocalDagster, str, dict[str, object]]:
    """Dagster that retries runs, the job and its configuration."""
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
    script = {"ranks": RANKS, "script": str(PROGRAMS / "recovery_bare.py"), "arguments": arguments}
    return dagster, "bare_job", {"ops": {"train": {"config": script}}}


if __name__ == "__main__":
    main()
