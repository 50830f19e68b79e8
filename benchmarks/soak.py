"""Faults of mixed kinds on runs that a real Dagster trains, until all are healed: `python -m benchmarks.soak [--quick]`.

The default is 30 minutes and 100 faults, which `--minutes` and `--faults` change. The same `--seed` chooses the same faults.
`--out FILE` keeps the campaign as JSON, rewritten after every fault, and `--docs FILE` only makes docs/evidence/soak.md of such a
file. It ends with status 1 once a fault is not healed in time, or at the end if a run is not exact or something is left over.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from benchmarks.soak_faults.account import launches_of, left_of, runs_of, trainers_of, wait_for_dagster
from benchmarks.soak_faults.choosing import KINDS, Choice, choose
from benchmarks.soak_faults.healing import Wound, heal, strike
from benchmarks.soak_faults.lab import RUNS, Lab, open_lab
from benchmarks.soak_faults.page import day_of, faults_of, page_of, seconds_by_kind
from dlac_pipeline.extensions.chaos.facts import Fault, add_facts

_PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "soak.md"
_STEPS, _QUICK_STEPS = 1_200, 600
"""Steps of one run."""
_FINISHED_WITHIN_S = 900.0
_NEEDS_MOUNT = ("store full",)


def main() -> int:
    """Run a campaign, or write its page, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--minutes", type=float, default=30.0, help="over which the faults are spread")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="every kind once, as fast as they are healed")
    parser.add_argument(
        "--home", type=Path, help="new folder of the lakehouse, which is kept; by default a temporary one"
    )
    parser.add_argument("--out", type=Path, help="JSON file of the campaign")
    parser.add_argument("--docs", type=Path, help="JSON file of a campaign, of which docs/evidence/soak.md is made")
    asked = parser.parse_args()
    if asked.docs:
        campaign = json.loads(asked.docs.read_text())
        _PAGE.write_text(page_of(campaign))
        _PAGE.with_suffix(".json").write_text(faults_of(campaign))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # after all clean-up
    minutes, faults = (0.0, len(KINDS)) if asked.quick else (asked.minutes, asked.faults)
    with ExitStack() as stack:
        home = asked.home or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dlac-soak-"))) / "home"
        home.mkdir(parents=True)
        lab = stack.enter_context(open_lab(home.resolve(), _QUICK_STEPS if asked.quick else _STEPS))
        campaign = Campaign(lab, minutes=minutes, faults=faults, seed=asked.seed, out=asked.out)
        campaign.run()
    return campaign.reported()


class Campaign:
    """One campaign in one lab."""

    def __init__(self, lab: Lab, *, minutes: float, faults: int, seed: int, out: Path | None) -> None:
        self._lab = lab
        self._minutes = minutes
        self._out = out
        self._skipped = [] if lab.can_fill else [kind for kind in _NEEDS_MOUNT if kind in KINDS]
        self._choices = choose(seed, faults, runs=RUNS, without=self._skipped)
        self._faults: list[Fault] = []
        self._began = time.time()
        self._kept: dict[str, Any] = {
            "seed": seed,
            "day": day_of(self._began),
            "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.release()}, Python {platform.python_version()}",
            "skipped": self._skipped,
            "runs": [],
            "left": {},
            "launch_folders": {},
            "failed": "",
            "remarks": [],  # remarks of an operator, added by hand
            "minutes_taken": 0.0,
        }

    def run(self) -> None:
        """Run all faults and the account. Failures are reported at the end."""
        try:
            references = self._lab.train_references()
            self._began = time.time()
            self._strike_all()
            self._lab.finish(_FINISHED_WITHIN_S)
            left = {"Dagster runs": wait_for_dagster(self._lab), "trainers": trainers_of(self._lab)}
            self._lab.stop_daemon()
            add_facts(self._lab.lakehouse, self._faults)
            self._kept["runs"] = [one.to_json() for one in runs_of(self._lab, references)]
            self._kept["left"] = {**left, **left_of(self._lab)}
            self._kept["launch_folders"] = launches_of(self._lab)
        except Exception as err:  # a failure must not lose the campaign
            traceback.print_exc()
            self._kept["failed"] = f"{type(err).__name__}: {err}"
        self._keep()

    def reported(self) -> int:
        """Print the figures, and return the exit status."""
        healed = [fault.recovery_s for fault in self._faults if fault.recovery_s is not None]
        runs = self._kept["runs"]
        wrong = [run["run"] for run in runs if not all(run[name] for name in _MUST_HOLD)]
        left = {name: found for name, found in self._kept["left"].items() if found}
        for message in filter(None, [self._kept["failed"], wrong and f"not exact: {wrong}", left and f"left: {left}"]):
            print(message, flush=True)
        figures = {
            "faults": Figure(value=len(self._faults), unit="faults", bar=f">= {len(self._choices)}"),
            "healed": Figure(value=len(healed), unit="faults", bar=f">= {len(self._choices)}"),
            "minutes": Figure(value=self._kept["minutes_taken"], unit="min"),
            "runs": Figure(value=len(runs), unit="runs", bar=">= 1"),
            "runs_not_exact": Figure(value=len(wrong), unit="runs", bar="<= 0"),
            "left_over": Figure(value=sum(map(len, left.values())), unit="things", bar="<= 0"),
            "recovery_s": Figure(value=statistics.median(healed or [0.0]), unit="s"),
            "recovery_worst_s": Figure(value=max(healed, default=0.0), unit="s"),
        }
        for kind, seconds in seconds_by_kind([fault.to_json() for fault in self._faults]).items():
            figures[f"{kind.replace(' ', '_')}_s"] = Figure(value=statistics.median(seconds), unit="s")
        report("soak", figures)
        return 0 if all(figure.holds for figure in figures.values()) else 1

    def _strike_all(self) -> None:
        wounds: list[Wound] = []
        for choice in self._choices:
            if not choice.follows:
                self._heal(wounds)
                self._wait_for(choice)
            wounds.append(strike(self._lab, choice, wounds[-1] if choice.follows else None))
            self._faults.append(wounds[-1].fault)
        self._heal(wounds)

    def _heal(self, wounds: list[Wound]) -> None:
        for wound in wounds:
            heal(self._lab, wound)
        if wounds:
            add_facts(self._lab.lakehouse, [wound.fault for wound in wounds])
            self._keep()
        for wound in wounds:
            print(json.dumps(wound.fault.to_json()), flush=True)
        wounds.clear()

    def _wait_for(self, choice: Choice) -> None:
        """Wait for the moment at which a fault is due. If healing takes longer, it is due at once."""
        while time.time() < self._began + choice.moment * self._minutes * 60:
            self._lab.tend()

    def _keep(self) -> None:
        self._kept["minutes_taken"] = (time.time() - self._began) / 60
        if self._out is not None:
            self._kept["faults"] = [self._without_paths(fault.to_json()) for fault in self._faults]
            self._out.write_text(json.dumps(self._kept, indent=1))

    def _without_paths(self, fault: dict[str, Any]) -> dict[str, Any]:
        """Return a fault whose causes have paths below the home or the project: the campaign is kept, and this machine is not."""
        home, project = f"{self._lab.home}/", f"{Path(__file__).parents[1]}/"
        causes = [
            cause.partition("\n")[0].replace(home, "").replace(project, "")
            for cause in fault["summary"].get("causes", ())
        ]
        return {**fault, "summary": {**fault["summary"], "causes": causes}}


_MUST_HOLD = ("finished", "audit_exact", "journal_agrees", "losses_identical")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        sys.exit(main())
