"""Journal of a replica group, and its death on order: both sides of the comparison write the same lines.

A line is a JSON object with `event`, `group`, `pid` and `at`. Events: `share` (rows that the group trains in a step), `committed`
and `died`, with the phase.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PHASES = ("forward", "all_reduce", "should_commit", "checkpoint", "healing")
"""Phases in which a group is killed."""
LIGHTHOUSE = -1
"""Number in the journal of the lighthouse, which is killed too."""


class GroupJournal:
    """Journal of one process of a group, in a folder that all groups and the killer share."""

    def __init__(self, folder: str, group: int) -> None:
        self._folder, self._group = Path(folder), group
        self._stream = (self._folder / f"{group}-{os.getpid()}.jsonl").open("a")

    def write(self, event: str, **facts: Any) -> None:
        """Append a line, which survives the death of the process."""
        line = {"event": event, "group": self._group, "pid": os.getpid(), "at": time.time(), **facts}
        self._stream.write(json.dumps(line) + "\n")
        self._stream.flush()

    def reaches(self, phase: str) -> None:
        """Die if the killer has ordered this group to die in this phase."""
        order = order_file(self._folder, self._group)
        if order.exists() and order.read_text() == phase:
            order.unlink()
            self.write("died", phase=phase)
            os.kill(os.getpid(), signal.SIGKILL)

    def die_in_second_call(
        self, function: Callable[..., Any], phase: str, *, per: Callable[[], int]
    ) -> Callable[..., Any]:
        """Return a function that reaches a phase in its second call in a step, whose number `per` returns."""
        calls: dict[int, int] = {}

        def watched(*arguments: Any, **options: Any) -> Any:
            step = per()
            calls[step] = calls.get(step, 0) + 1
            if calls[step] == 2:
                self.reaches(phase)
            return function(*arguments, **options)

        return watched


def order_file(folder: Path, group: int) -> Path:
    """Return the file by which the killer orders a group to die. It has the phase."""
    return folder / f"order-{group}"


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Return all complete lines of all groups, in order of time."""
    lines = [line for path in folder.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return sorted(found, key=lambda each: float(each["at"]))
