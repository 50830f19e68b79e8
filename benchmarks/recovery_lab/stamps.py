"""Runs whose ranks are killed, and their finished steps, which rank 0 stamps in a file."""

import itertools
import os
import signal
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

_LIMIT_S = 600.0


class Stamp(NamedTuple):
    """A finished step of one process."""

    pid: int
    step: int
    done: float


class StampFile:
    """The stamps in a file that ranks append to. Each is parsed once, because a recovery is measured while the file is polled."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._bytes_read = 0
        self._stamps: list[Stamp] = []

    def read(self, *, after: int = 0) -> list[Stamp]:
        """Return the stamps that are whole, without the first `after` ones."""
        if self._path.exists():
            with self._path.open("rb") as stream:
                stream.seek(self._bytes_read)
                lines, newline, _ = stream.read().rpartition(b"\n")
            self._bytes_read += len(lines) + len(newline)
            for pid, step, done in map(bytes.split, lines.splitlines()):
                self._stamps.append(Stamp(int(pid), int(step), float(done)))
        return self._stamps[after:]


def read_stamps(path: Path) -> list[Stamp]:
    """Return the stamps that are whole."""
    return StampFile(path).read()


def count_repeated(stamps: Sequence[Stamp]) -> list[int]:
    """Return the number of finished steps that were repeated, for each restart."""
    attempts = [[each.step for each in found] for _, found in itertools.groupby(stamps, lambda each: each.pid)]
    return [max(0, before[-1] - after[0] + 1) for before, after in itertools.pairwise(attempts)]


def spent_on_states(stamps: Sequence[Stamp], kept: Container[int]) -> list[float]:
    """Return how many seconds longer each step with a state is than the median of other steps, up to the end of the next step."""
    seconds = {each.step: later.done - each.done for each, later in itertools.pairwise(stamps)}
    usual = statistics.median([spent for step, spent in seconds.items() if step not in kept] or [0.0])
    return [spent - usual for step, spent in seconds.items() if step in kept]


class StampedRun(ABC):
    """A run that stamps its steps."""

    stamps: Path
    failure: Exception | None = None
    """Why the run has ended, if it failed."""

    @abstractmethod
    def ranks(self) -> list[int]:
        """Return the processes of the ranks, in the order of the ranks."""

    @abstractmethod
    def running(self, *, to_the_end: bool = False) -> AbstractContextManager[None]:
        """Run it, until the end of the block or of the run."""

    def lines(self) -> list[Stamp]:
        """Return the stamps of all finished steps."""
        return read_stamps(self.stamps)

    @property
    def last_step(self) -> int:
        """The last step that was finished."""
        return max((each.step for each in self.lines()), default=0)

    def wait_for_steps(self, count: int) -> None:
        """Wait for further steps. Raise `TimeoutError` if there are none in time, or the failure of the run."""
        before, deadline = len(self.lines()), time.monotonic() + _LIMIT_S
        while len(self.lines()) < before + count:
            self._check(deadline)
            time.sleep(0.01)

    def kill(self, victim: int | None) -> tuple[float, float]:
        """Kill a process, or all ranks. Return the seconds to the next step, and to the first one that is new.

        Raises:
            TimeoutError: there is no new step in time. The failure of the run, if it has failed.
        """
        pids, reached, deadline = self.ranks(), self.last_step, time.monotonic() + _LIMIT_S
        self._check(deadline)
        killed_at = time.time()
        for pid in pids if victim is None else [victim]:
            os.kill(pid, signal.SIGKILL)
        while True:
            later = [
                (each.step, each.done - killed_at)
                for each in self.lines()
                if each.pid not in pids and each.done > killed_at
            ]
            new = [after_s for step, after_s in later if step > reached]
            if new:
                return later[0][1], new[0]
            self._check(deadline)
            time.sleep(0.005)

    def _check(self, deadline: float) -> None:
        if self.failure is not None:
            raise self.failure
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected further steps within {_LIMIT_S:.0f} s, found none in {str(self.stamps)!r}")
