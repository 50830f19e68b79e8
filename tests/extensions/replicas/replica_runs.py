"""Runs with replica groups in tests: their start, and the journals of their ranks."""

import json
import re
from dataclasses import dataclass
from typing import Any

from tests.conftest import Arena, Launch, Steps

STEPS = 60


@dataclass(frozen=True)
class Journals:
    """The journals of the ranks of a run of replica groups."""

    entries: list[dict[str, Any]]

    @property
    def journal(self) -> Steps:
        """Row ids of each step in slot order: the shares of the ranks of its last try, if a rank of that try committed it."""
        steps: Steps = {}
        for entry in sorted(self.entries, key=lambda each: each["at"]):
            if entry["event"] == "committed":
                shares = [
                    each
                    for each in self.entries
                    if (each["event"], each["step"], each["ranks"]) == ("share", entry["step"], entry["ranks"])
                    and each["at"] < entry["at"]
                ]
                latest = {each["rank"]: each for each in sorted(shares, key=lambda each: each["at"])}
                tried = sorted(latest.values(), key=lambda each: each["at"])[-entry["ranks"] :]
                assert len(tried) == entry["ranks"], f"step {entry['step']}: the shares of ranks {sorted(latest)}"
                steps[entry["step"]] = [
                    row for each in sorted(tried, key=lambda each: each["rank"]) for row in each["rows"]
                ]
        return steps

    @property
    def processes(self) -> dict[int, set[int]]:
        """Process ids by rank."""
        found: dict[int, set[int]] = {}
        for entry in self.entries:
            found.setdefault(entry["rank"], set()).add(entry["pid"])
        return found


@dataclass(frozen=True)
class Trained(Journals):
    """A run of replica groups that has ended."""

    launch: Launch


def launch_groups(campaign: Arena, run: str, *, replicas: int = 3, **changes: Any) -> Launch:
    """Start a run with replica groups."""
    settings = {"replicas": replicas, "world_size": 1, "steps": STEPS, **changes}
    return campaign.launch(campaign.spec(run, "train_replicas.py", **settings))


def train(campaign: Arena, run: str, **changes: Any) -> Trained:
    """Train a run with replica groups, three unless named otherwise, to its end."""
    launch = launch_groups(campaign, run, **changes)
    assert launch.wait() == 0, launch.stderr + str(launch.events[-3:])
    assert launch.of("ended")[0]["ending"] == "finished"
    return Trained(entries_of(campaign, run), launch)


def entries_of(campaign: Arena, run: str) -> list[dict[str, Any]]:
    """Return the lines of the journals of a run's ranks."""
    journals = (campaign.home / "journal").iterdir()  # also those of other tests
    paths = [path for path in journals if re.fullmatch(rf"{re.escape(run)}-\d+-\d+\.jsonl", path.name)]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]
