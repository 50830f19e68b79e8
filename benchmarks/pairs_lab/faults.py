"""Launches of `dlac train`, and the fault that hits one of them."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.pairs_lab.log import WrongCombination, last_attempt, read_entries
from benchmarks.pairs_lab.scene import Scene
from dlac_pipeline.extensions.chaos.strikes import kill_tree, move_catalog, ranks_below, send_signal
from dlac_pipeline.lakehouse.errors import CatalogUnreachable, Preempted, StoreUnavailable
from tests.forked import Forked

_WITHIN_S, _AWAY_S = 240.0, 2.0
_ENDINGS = {
    "SIGTERM": (0, Preempted.exit_code),
    "SIGTERM after recovery": (0, Preempted.exit_code),
    "all killed": (-signal.SIGKILL,),
    "store full": (0, StoreUnavailable.exit_code),
    "catalog away": (0, CatalogUnreachable.exit_code),
}
"""Fault -> exit statuses of the launch that it hits. Of the others it is 0."""


class Training:
    """A `dlac train` process of a scene."""

    def __init__(self, scene: Scene, run: str | None = None) -> None:
        self.scene, self.run = scene, run or scene.run
        self.known = last_attempt(read_entries(scene.log, self.run))
        """The last attempt of earlier launches."""
        number = len(list(scene.home.glob(f"{self.run}.*.out")))
        self.output = scene.home / f"{self.run}.{number}.out"
        with self.output.open("wb") as out:
            self.process = Forked(
                [
                    sys.executable,
                    "-m",
                    "dlac_pipeline.cli.main",
                    "train",
                    str(scene.job_file(self.run)),
                    "--home",
                    str(scene.home),
                ],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **scene.environment},
                cwd=scene.home,
                start_new_session=True,
            )

    def wait(self, *expected: int) -> int:
        """Wait for its end, and return the exit status, which is 0 or one of the expected ones."""
        try:
            status = int(self.process.wait(timeout=_WITHIN_S))
        except subprocess.TimeoutExpired:
            self.destroy()
            raise WrongCombination(
                f"expected the end of the launch in {_WITHIN_S:.0f} s, found none:\n{self.tail()}"
            ) from None
        if status not in (expected or (0,)):
            raise WrongCombination(f"expected exit status {expected or (0,)!r}, found {status}:\n{self.tail()}")
        return status

    def tail(self) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.output.read_text(errors="replace").splitlines()[-30:])

    def ranks(self) -> list[psutil.Process]:
        """Return its living ranks."""
        with suppress(psutil.NoSuchProcess):
            return list(ranks_below(psutil.Process(self.process.pid), self.run).values())
        return []

    def destroy(self) -> None:
        """Kill the supervisor and its ranks."""
        if self.process.poll() is None:
            with suppress(psutil.NoSuchProcess):
                kill_tree(psutil.Process(self.process.pid))
        self.process.wait()

    def steps(self) -> int:
        """Return the number of different steps that it has made."""
        made = {
            e["step"]
            for e in read_entries(self.scene.log, self.run)
            if e["attempt"] > self.known and e["kind"] == "step"
        }
        return len(made)

    def processes(self) -> set[int]:
        """Return the processes with a line."""
        return {
            e["pid"]
            for e in read_entries(self.scene.log, self.run)
            if e["attempt"] > self.known and e["kind"] == "step"
        }

    def wait_until(self, holds: Callable[[], bool], what: str) -> bool:
        """Poll until the condition holds. Return False if the launch has ended before."""
        deadline = time.monotonic() + _WITHIN_S
        while not holds():
            if self.process.poll() is not None:
                return holds()
            if time.monotonic() > deadline:
                self.destroy()
                raise WrongCombination(f"expected {what} in {_WITHIN_S:.0f} s, found none:\n{self.tail()}")
            time.sleep(0.03)
        return True


def train(scene: Scene, run: str | None = None) -> Training:
    """Train without a fault, to the end."""
    launch = Training(scene, run)
    launch.wait()
    return launch


def stop_early(scene: Scene, steps: int) -> None:
    """Train some steps, and stop in order."""
    scene.slow.touch()
    launch = Training(scene)
    launch.wait_until(lambda: launch.steps() >= steps, f"{steps} steps")
    send_signal([psutil.Process(launch.process.pid)], signal.SIGTERM)
    scene.slow.unlink()
    launch.wait(0, Preempted.exit_code)


def train_with_fault(scene: Scene) -> None:
    """Train to the end with the fault of the combination, in as many launches as it takes."""
    scene.slow.touch()
    fault, launch = scene.combination["fault"], Training(scene)
    wanted = scene.chance.randint(1, 4)
    if not launch.wait_until(lambda: launch.steps() >= wanted, f"{wanted} steps"):
        raise WrongCombination(
            f"expected {wanted} steps before the fault, found the end of the launch:\n{launch.tail()}"
        )
    _FAULTS[fault](launch)
    scene.slow.unlink()
    status = launch.wait(*_ENDINGS.get(fault, (0,)))
    if status != 0 or "SIGTERM" in fault:
        train(scene)


def _kill_rank(launch: Training) -> None:
    if ranks := launch.ranks():
        send_signal([launch.scene.chance.choice(ranks)], signal.SIGKILL)


def _kill_again(launch: Training) -> None:
    launch.scene.again.touch()
    _kill_rank(launch)
    launch.wait_until(lambda: not launch.scene.again.exists(), "a second death")


def _kill_all(launch: Training) -> None:
    with suppress(psutil.NoSuchProcess):
        kill_tree(psutil.Process(launch.process.pid))


def _terminate(launch: Training) -> None:
    with suppress(psutil.NoSuchProcess):
        send_signal([psutil.Process(launch.process.pid)], signal.SIGTERM)


def _terminate_after_recovery(launch: Training) -> None:
    known = launch.processes() | {rank.pid for rank in launch.ranks()}  # a slow rank may not have its first line yet
    _kill_rank(launch)
    launch.wait_until(lambda: bool(launch.processes() - known), "a step after the recovery")
    _terminate(launch)


def _fill_store(launch: Training) -> None:
    filler = Path(launch.scene.store, "filler")
    with suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(bytes(4096))
            file.flush()
    time.sleep(_AWAY_S)
    filler.unlink()


def _move_catalog(launch: Training) -> None:
    with move_catalog(launch.scene.home / "catalog.db"):
        time.sleep(_AWAY_S)


_FAULTS: dict[str, Callable[[Training], None]] = {
    "rank killed": _kill_rank,
    "killed again": _kill_again,
    "all killed": _kill_all,
    "SIGTERM": _terminate,
    "SIGTERM after recovery": _terminate_after_recovery,
    "store full": _fill_store,
    "catalog away": _move_catalog,
}
