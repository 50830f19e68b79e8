"""The log of the training script: what each rank trained on, in the attempt that counts."""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Entry = dict[str, Any]


class WrongCombination(AssertionError):
    """Something is otherwise than the script's log, or the documentation, says."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step as the attempt that counts made it."""

    number: int
    attempt: int
    shares: list[Entry]
    """By rank."""
    ends: list[Entry]
    """Of the ranks that lived to write them, by rank."""

    @property
    def rows(self) -> Counter[int]:
        """The rows of all ranks."""
        return Counter(row for share in self.shares for row in share["rows"])


def read_entries(folder: Path, run: str) -> list[Entry]:
    """Return the whole lines of a run, by their time."""
    lines = [line for path in folder.glob(f"{run}-[0-9]*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    return sorted((json.loads(line) for line in lines if line.endswith("\n")), key=lambda entry: entry["at"])


def last_attempt(entries: list[Entry]) -> int:
    """Return the number of the newest attempt with a line."""
    return max((entry["attempt"] for entry in entries), default=0)


def read_steps(entries: list[Entry], *, branches: list[int] = ()) -> list[Step]:  # type: ignore[assignment]
    """Return the steps of the run. Each of `branches` is the last attempt before a rewind: later attempts replace its steps."""
    ends: dict[int, int] = {}
    for entry in entries:
        if entry["kind"] == "step":
            ends[entry["step"]] = max(ends.get(entry["step"], 0), entry["attempt"])
    for left in branches:
        began = min((entry["step"] for entry in entries if entry["attempt"] > left), default=0)
        ends = {step: attempt for step, attempt in ends.items() if attempt > left or step < began or not began}
    return [_step(entries, step, attempt) for step, attempt in sorted(ends.items())]


def _step(entries: list[Entry], number: int, attempt: int) -> Step:
    mine = [entry for entry in entries if (entry["step"], entry["attempt"]) == (number, attempt)]
    done = [entry for entry in mine if entry["kind"] == "step"]
    ranks = done[-1]["ranks"]  # groups may have made the step more than once
    ends = {entry["rank"]: entry for entry in done if entry["ranks"] == ranks}
    before = [
        entry for entry in mine if entry["kind"] == "share" and entry["ranks"] == ranks and entry["at"] < done[-1]["at"]
    ]
    shares = {entry["rank"]: entry for entry in before}
    latest = sorted(shares.values(), key=lambda entry: entry["at"])[-ranks:]
    if len(latest) != ranks:
        raise WrongCombination(f"step {number}: expected shares of {ranks} ranks, found those of {sorted(shares)}")
    return Step(
        number=number,
        attempt=attempt,
        shares=sorted(latest, key=lambda entry: entry["rank"]),
        ends=[ends[rank] for rank in sorted(ends)],
    )
