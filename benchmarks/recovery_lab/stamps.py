"""Runs whose ranks are killed, and their finished steps, which rank 0 stamps in a file."""

from __future__ import annotations

import itertools
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

_LIMIT_S = 600.0


class Stamp(NamedTuple):
    """A finished step of one process."""

    pid: int
    step: int
    done: float
    after: float
    """The time once the state was kept, if one was due."""


def read_stamps(path: Path) -> list[Stamp]:
    """Return the stamps that are whole."""
    text = path.read_text() if path.exists() else ""
    found = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [Stamp(int(pid), int(step), float(done), float(after)) for pid, step, done, after in found]


def count_repeated(stamps: Sequence[Stamp]) -> list[int]:
    """Return the number of finished steps that were repeated, for each restart."""
    attempts = [[each.step for each in found] for _, found in itertools.groupby(stamps, lambda each: each.pid)]
    return [max(0, before[-1] - after[0] + 1) for before, after in itertools.pairwise(attempts)]


class StampedRun(ABC):
    """A run that stamps its steps."""

    stamps: Path

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
        """Wait for further steps. Raise `TimeoutError` if there are none in time."""
        before, deadline = len(self.lines()), time.monotonic() + _LIMIT_S
        while len(self.lines()) < before + count:
            _check(deadline, self.stamps)
            time.sleep(0.01)

    def kill(self, victim: int | None) -> tuple[float, float]:
        """Kill a process, or all ranks. Return the seconds to the next step, and to the first one that is new.

        Raises:
            TimeoutError: there is no new step in time.
        """
        pids, reached, deadline = self.ranks(), self.last_step, time.monotonic() + _LIMIT_S
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
            _check(deadline, self.stamps)
            time.sleep(0.005)


def _check(deadline: float, stamps: Path) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"expected further steps within {_LIMIT_S:.0f} s, found none in {str(stamps)!r}")
