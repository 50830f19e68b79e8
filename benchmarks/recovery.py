"""From SIGKILL of a rank to the first new optimizer step: `python -m benchmarks.recovery [--quick]`.

Two ranks train a small model with DeepSpeed, with a checkpoint every 5 steps. With DLAC the supervisor recovers: it ends the
other rank, claims the run, verifies the newest checkpoint and resumes exactly after it. The other side is a bare relaunch of
the same training: a loop that ends the other rank and starts the script again, which loads DeepSpeed's latest checkpoint and
reads from the first row, whatever it has read before. The sides alternate, with a few kills each. Both are timed from outside,
from the kill to the step's stamp. `spawned` is DLAC with a new Python for every rank, like the bare relaunch.
"""

import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from benchmarks.figures import Figure, report
from benchmarks.programs.recovery_sizes import EVERY_STEPS
from benchmarks.recovery_lab.comparison import compare_with_bare
from benchmarks.recovery_lab.training import PROGRAMS, RANKS, job, make_source, source_files, steps_after
from dlac_pipeline.lakehouse.iceberg.connect import Lakehouse
from dlac_pipeline.spec.job_spec import parse_spec
from dlac_pipeline.spec.launch_request import Request
from dlac_pipeline.supervise.supervisor import Supervisor

_SIDES = ("forked", "spawned", "bare")
_PHASES = ("detect_s", "stop_s", "claim_s", "verify_s", "load_s", "first_step_s")
_POLL_S = 0.05
"""The interval of DLAC's supervisor."""


def main() -> None:
    """Kill in turn, and report."""
    rounds, kills = (1, 2) if "--quick" in sys.argv[1:] else (4, 5)
    measured: dict[str, list[float]] = {side: [] for side in _SIDES}
    phases: list[dict[str, Any]] = []
    for number in range(rounds):
        for side in _SIDES:
            with tempfile.TemporaryDirectory(prefix="dlac-recovery-") as home:
                found, recovered = campaign(Path(home), side, kills, random.Random(number))
            measured[side] += found
            phases += recovered if side == "forked" else []
            print(json.dumps({"side": side, "recovery_s": found}), flush=True)
    figures = compare_with_bare(measured, "forked", most=1.0)
    spawned, bare = (statistics.median(measured[side]) for side in ("spawned", "bare"))
    figures["spawned_over_bare"] = Figure(value=spawned / bare, unit="ratio")
    for phase in _PHASES:
        figures[f"forked_{phase}"] = Figure(value=statistics.median(one[phase] for one in phases), unit="s")
    report("recovery", figures)


class _Training(Protocol):
    """Two ranks that are started again when one dies."""

    def pids(self) -> list[int]: ...
    def stop(self) -> None: ...


def campaign(home: Path, side: str, kills: int, chance: random.Random) -> tuple[list[float], list[dict[str, Any]]]:
    """Return the seconds from each kill to the first new step, and DLAC's events."""
    lakehouse = make_source(home)
    stamps = home / "stamps"
    training = _Bare(home, lakehouse, stamps) if side == "bare" else _Supervised(home, side, stamps)
    found = []
    with _run(training):
        steps_after(stamps, 0.0, 2 * EVERY_STEPS)
        for _ in range(kills):
            pids = training.pids()
            time.sleep(chance.uniform(0.0, 0.1))
            os.kill(pids[-1], signal.SIGKILL)
            killed_at = time.time()
            found.append(steps_after(stamps, killed_at, 1, not_by=pids[:1]) - killed_at)
            steps_after(stamps, killed_at, 2 * EVERY_STEPS, not_by=pids[:1])
    return found, getattr(training, "recovered", [])


@contextmanager
def _run(training: _Training) -> Iterator[None]:
    try:
        yield
    finally:
        training.stop()


class _Supervised:
    """The training with DLAC."""

    def __init__(self, home: Path, side: str, stamps: Path) -> None:
        start = "fork" if side == "forked" else "spawn"
        spec = parse_spec(job(stamps, start=start), origin="the benchmark").resolved(home)
        self.recovered: list[dict[str, Any]] = []
        self._pids: list[int] = []
        self._supervisor = Supervisor(Request(spec=spec), on_event=self._record)
        self._thread = threading.Thread(target=self._supervisor.run)
        self._thread.start()

    def _record(self, event: dict[str, Any]) -> None:
        if event["event"] == "attempt":
            self._pids = event["pids"]
        if event["event"] == "recovered":
            self.recovered.append(event)

    def pids(self) -> list[int]:
        """Return the process ids by rank."""
        return self._pids

    def stop(self) -> None:
        """Stop in order."""
        self._supervisor.stop()
        self._thread.join()


class _Bare:
    """A loop that starts the script again."""

    def __init__(self, home: Path, lakehouse: Lakehouse, stamps: Path) -> None:
        self._command = [sys.executable, str(PROGRAMS / "recovery_bare.py"), str(home / "plain"), str(stamps)]
        self._command += source_files(lakehouse)
        self._log = (home / "bare.log").open("ab")
        self._stopped = threading.Event()
        self._ranks: list[subprocess.Popen[bytes]] = []
        self._thread = threading.Thread(target=self._relaunch)
        self._thread.start()

    def _relaunch(self) -> None:
        while not self._stopped.is_set():
            self._ranks = [self._start(rank, port) for port in [_free_port()] for rank in range(RANKS)]
            while not self._stopped.is_set() and all(rank.poll() is None for rank in self._ranks):
                time.sleep(_POLL_S)
            for rank in self._ranks:
                with suppress(ProcessLookupError):
                    rank.kill()
                rank.wait()

    def _start(self, rank: int, port: int) -> subprocess.Popen[bytes]:
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": RANKS,
            "LOCAL_WORLD_SIZE": RANKS,
            "MASTER_PORT": port,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "MASTER_ADDR": "127.0.0.1"}
        environment |= {name: str(value) for name, value in place.items()}
        return subprocess.Popen(self._command, env=environment, stdout=self._log, stderr=self._log)

    def pids(self) -> list[int]:
        """Return the process ids by rank."""
        return [rank.pid for rank in self._ranks]

    def stop(self) -> None:
        """Stop at once."""
        self._stopped.set()
        self._thread.join()
        self._log.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    main()
