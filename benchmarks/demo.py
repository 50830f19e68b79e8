"""The demo and its figures: `python -m benchmarks.demo`.

It runs `make demo` in a folder of its own, and shows its lines. The first lines that name documents, a work plan and a checkpoint
are timed from the start of the command. All else is in the demo's report.json. A recovery lasts from the last heartbeat to
the first new step.
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, report
from dlac_pipeline.lakehouse.ledger.recoveries import Recovery

_FIRST = {"documents": "are in the Iceberg table", "plan": "Work plan", "checkpoint": "checkpoint of step"}
"""Words of the first line that shows each result."""


def main() -> int:
    """Run the demo, and report. Return its exit status, or 1 if a bar is missed."""
    with tempfile.TemporaryDirectory(prefix="dlac-demo-") as folder:
        began = time.monotonic()
        status, first = _run(
            [sys.executable, "-m", "examples.demo.main_job", "--home", f"{folder}/home", "--report", f"{folder}/report"]
        )
        demo_s = time.monotonic() - began
        found = json.loads((Path(folder) / "report" / "report.json").read_text())
    figures = {"demo_s": Figure(value=demo_s, unit="s", bar="<= 120"), **_first(first), **_rest(found)}
    report("demo", figures)
    return status or int(not all(figure.holds for figure in figures.values()))


def _run(command: list[str]) -> tuple[int, dict[str, float]]:
    """Run a command, and return its exit status and the seconds until the first line with each of `_FIRST`."""
    began, first = time.monotonic(), dict[str, float]()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            for name, words in _FIRST.items():
                if words in line:
                    first.setdefault(name, time.monotonic() - began)
    return process.returncode, first


def _first(seconds: dict[str, float]) -> dict[str, Figure]:
    bars = {"documents": "<= 30"}
    return {f"first_{name}_s": Figure(value=seconds[name], unit="s", bar=bars.get(name)) for name in _FIRST}


def _rest(found: dict[str, Any]) -> dict[str, Figure]:
    figures = {
        "rows": Figure(value=found["audits"]["reference"]["rows_live"], unit="rows"),
        "steps_compared": Figure(value=found["steps_compared"], unit="steps", bar=">= 1"),
        "steps_differing": Figure(value=len(found["steps_differing"]), unit="steps", bar="<= 0"),
        "runs_not_exact": Figure(
            value=sum(not audit["exact"] for audit in found["audits"].values()), unit="runs", bar="<= 0"
        ),
        "demo_holds": Figure(value=found["ok"], unit="of 1", bar=">= 1"),
        "recoveries": Figure(value=len(found["recoveries"]), unit="recoveries", bar=">= 2"),
    }
    if not found["recoveries"]:
        return figures
    faults = (found["recoveries"][0], found["recoveries"][-1])  # the sensor recovers last
    for fault, recovery in zip(("rank_killed", "dagster_run_killed"), faults, strict=True):
        figures[f"{fault}_recovery_s"] = Figure(value=Recovery(**recovery).recovered_s, unit="s")
        figures[f"{fault}_rows_again"] = Figure(value=recovery["rows_replayed"], unit="rows")
    return figures


if __name__ == "__main__":
    sys.exit(main())
